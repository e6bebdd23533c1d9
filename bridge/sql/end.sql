-- end: the job ends without a result (fail, abort, cancel); the error, if any, and the end are written together
WITH moved AS (
    UPDATE job
    SET status = %(target)s::text, modified_at = clock_timestamp(),
        error = coalesce(%(error)s::jsonb, error), lease_until = NULL
    WHERE id = %(id)s::uuid AND tenant = %(tenant)s::text AND status = ANY(%(sources)s::text[])
        AND (%(run)s::uuid IS NULL OR run_id = %(run)s::uuid)
    RETURNING id, status
)
INSERT INTO job_event (job_id, kind, payload, actor, created_at)
SELECT id, %(kind)s::text, jsonb_build_object('outcome', status), %(actor)s::text, clock_timestamp()
FROM moved
