-- handed_over: the queues that hold handed-over rows, with the age of the oldest
SELECT queue, extract(epoch FROM clock_timestamp() - min(modified_at))::float8 AS oldest
FROM job
WHERE tenant = %(tenant)s::text AND status = 'scheduled'
GROUP BY queue
