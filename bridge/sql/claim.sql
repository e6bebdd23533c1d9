-- claim: the ticket's row becomes this run's, and its start is written with it
WITH moved AS (
    UPDATE job
    SET status = %(target)s::text, started_at = clock_timestamp(), modified_at = clock_timestamp(),
        run_id = %(run)s::uuid, worker = %(actor)s::text, retry_lost = %(retry_lost)s::boolean,
        lease_until = clock_timestamp() + %(lease)s::bigint * interval '1 millisecond'
    WHERE id = %(id)s::uuid AND scheduled_at = %(scheduled_at)s::timestamptz
        AND name = %(name)s::text AND tenant = %(tenant)s::text
        AND status = ANY(%(sources)s::text[])
        AND (start_before IS NULL OR start_before > clock_timestamp())
    RETURNING *
), logged AS (
    INSERT INTO job_event (job_id, kind, payload, actor, created_at)
    SELECT id, %(kind)s::text, jsonb_build_object('attempt', retry_num + 1), %(actor)s::text, clock_timestamp()
    FROM moved
)
SELECT /*job*/
FROM moved
