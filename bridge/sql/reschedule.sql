-- reschedule: a ticket is lost or came back unused; the row keeps its place in line under a new one
WITH found AS (
    SELECT id
    FROM job
    WHERE id = ANY(%(ids)s::uuid[]) AND tenant = %(tenant)s::text AND status = ANY(%(sources)s::text[])
        AND (%(scheduled_at)s::timestamptz IS NULL OR scheduled_at = %(scheduled_at)s::timestamptz)
    ORDER BY id
    FOR UPDATE SKIP LOCKED  -- a row that somebody works on is looked at again later
), moved AS (
    UPDATE job
    SET status = %(target)s::text, modified_at = clock_timestamp(), lease_until = NULL,
        scheduled_at = scheduled_at + interval '1 millisecond'
    FROM found
    WHERE job.id = found.id
    RETURNING job.tenant
), woken AS (
    SELECT bridge_wake(tenant) FROM (SELECT DISTINCT tenant FROM moved) AS tenants
)
SELECT count(*) AS moved, (SELECT count(*) FROM woken) AS woken FROM moved
