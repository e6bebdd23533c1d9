-- complete: the run is done; its result and the end are written together
WITH moved AS (
    UPDATE job
    SET status = %(target)s::text, completed_at = clock_timestamp(), modified_at = clock_timestamp(),
        result = %(result)s::jsonb, resource_id = coalesce(resource_id, %(resource_id)s::uuid),
        error = NULL, lease_until = NULL
    WHERE id = %(id)s::uuid AND tenant = %(tenant)s::text AND status = ANY(%(sources)s::text[])
        AND (%(run)s::uuid IS NULL OR run_id = %(run)s::uuid)
        AND (%(resource_id)s::uuid IS NULL OR resource_id IS NULL OR resource_id = %(resource_id)s::uuid)
    RETURNING id, status
)
INSERT INTO job_event (job_id, kind, payload, actor, created_at)
SELECT id, %(kind)s::text, jsonb_build_object('outcome', status), %(actor)s::text, clock_timestamp()
FROM moved
