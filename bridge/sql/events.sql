-- events: the history of one job, oldest first
SELECT event.id, event.job_id, event.kind, event.payload, event.actor, event.created_at
FROM job_event AS event
JOIN job ON job.id = event.job_id
WHERE event.job_id = %(id)s::uuid AND job.tenant = %(tenant)s::text
ORDER BY event.id
