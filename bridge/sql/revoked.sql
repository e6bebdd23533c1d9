-- revoked: jobs that were cancelled or aborted since an event, for Celery's own monitors
SELECT event.id, event.job_id, job.tenant
FROM job_event AS event
JOIN job ON job.id = event.job_id
WHERE event.id > %(after)s::bigint AND event.kind = 'end'
    AND event.payload ->> 'outcome' IN ('cancelled', 'aborted')
ORDER BY event.id
LIMIT 1000
