-- late: pending jobs that were to start before a time that has passed are cancelled; one of them, or the first few
WITH late AS (
    SELECT id
    FROM job
    WHERE tenant = %(tenant)s::text AND status IN ('new', 'scheduled', 'retry')
        AND start_before <= statement_timestamp() AND (%(id)s::uuid IS NULL OR id = %(id)s::uuid)
    ORDER BY start_before
    LIMIT %(limit)s::bigint
    FOR UPDATE SKIP LOCKED
), moved AS (
    UPDATE job
    SET status = %(target)s::text, modified_at = clock_timestamp(), lease_until = NULL
    FROM late
    WHERE job.id = late.id AND job.status = ANY(%(sources)s::text[])
    RETURNING job.id, job.status
), logged AS (
    INSERT INTO job_event (job_id, kind, payload, actor, created_at)
    SELECT id, %(kind)s::text, jsonb_build_object('outcome', status), %(actor)s::text, clock_timestamp()
    FROM moved
)
SELECT id
FROM moved
