-- heartbeat: under the row's lock, renew the lease and write progress, so that none follows the end
WITH held AS (
    SELECT id
    FROM job
    WHERE id = %(id)s::uuid AND tenant = %(tenant)s::text AND status = 'running'
        AND (%(run)s::uuid IS NULL OR run_id = %(run)s::uuid)
    FOR UPDATE
), renewed AS (
    UPDATE job
    SET lease_until = clock_timestamp() + %(lease)s::bigint * interval '1 millisecond'
    FROM held
    WHERE job.id = held.id AND %(renew)s::boolean
    RETURNING job.id
), logged AS (
    INSERT INTO job_event (job_id, kind, payload, actor, created_at)
    SELECT id, 'progress', %(progress)s::jsonb, %(actor)s::text, clock_timestamp()
    FROM held
    WHERE %(progress)s::jsonb IS NOT NULL
    RETURNING id
)
SELECT
    (SELECT count(*) FROM held) AS held,
    (SELECT count(*) FROM renewed) + (SELECT count(*) FROM logged) AS written
