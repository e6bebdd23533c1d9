-- retry: the job runs again later (retry, release); the new ticket is strictly later than every old one
WITH moved AS (
    UPDATE job
    SET status = %(target)s::text, modified_at = clock_timestamp(),
        retry_num = retry_num + %(used)s::integer, error = coalesce(%(error)s::jsonb, error), lease_until = NULL,
        scheduled_at = greatest(
            date_trunc('milliseconds', clock_timestamp() + %(delay)s::bigint * interval '1 millisecond'),
            scheduled_at + interval '1 millisecond'
        )
    WHERE id = %(id)s::uuid AND tenant = %(tenant)s::text AND status = ANY(%(sources)s::text[])
        AND (%(run)s::uuid IS NULL OR run_id = %(run)s::uuid)
    RETURNING id, retry_num, tenant
), logged AS (
    INSERT INTO job_event (job_id, kind, payload, actor, created_at)
    SELECT id, %(kind)s::text, jsonb_build_object('attempt', retry_num + 1, 'reason', %(reason)s::text),
        %(actor)s::text, clock_timestamp()
    FROM moved
)
SELECT bridge_wake(tenant) FROM moved
