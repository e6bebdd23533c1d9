-- renew: the leases of the runs that this worker executes; rows locked by somebody else wait for the next turn
WITH mine AS (
    SELECT id
    FROM job
    WHERE id = ANY(%(ids)s::uuid[]) AND run_id = ANY(%(runs)s::uuid[]) AND status = 'running'
    ORDER BY id
    FOR UPDATE SKIP LOCKED
)
UPDATE job
SET lease_until = clock_timestamp() + %(lease)s::bigint * interval '1 millisecond'
FROM mine
WHERE job.id = mine.id
