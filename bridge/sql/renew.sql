-- renew: the leases of the runs that this worker executes; says how many rows somebody else had locked
WITH held AS (
    SELECT id
    FROM job
    WHERE id = ANY(%(ids)s::uuid[]) AND run_id = ANY(%(runs)s::uuid[]) AND status = 'running'
), mine AS (
    SELECT id
    FROM job
    WHERE id = ANY(%(ids)s::uuid[]) AND run_id = ANY(%(runs)s::uuid[]) AND status = 'running'
    ORDER BY id
    FOR UPDATE SKIP LOCKED
), renewed AS (
    UPDATE job
    SET lease_until = clock_timestamp() + %(lease)s::bigint * interval '1 millisecond'
    FROM mine
    WHERE job.id = mine.id
    RETURNING job.id
)
SELECT (SELECT count(*) FROM held) AS held, (SELECT count(*) FROM renewed) AS renewed
