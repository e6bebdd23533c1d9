-- hold: handed-over rows whose messages wait in this worker; they are not lost
WITH mine AS (
    SELECT job.id
    FROM job
    JOIN unnest(%(ids)s::uuid[], %(scheduled_ats)s::timestamptz[]) AS ticket (id, scheduled_at)
        ON job.id = ticket.id AND job.scheduled_at = ticket.scheduled_at
    WHERE job.status = 'scheduled'
    ORDER BY job.id
    FOR UPDATE OF job SKIP LOCKED
)
UPDATE job
SET lease_until = clock_timestamp() + %(lease)s::bigint * interval '1 millisecond'
FROM mine
WHERE job.id = mine.id
