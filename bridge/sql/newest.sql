-- newest: the last few rows that were handed over to a queue
SELECT id, modified_at
FROM job
WHERE tenant = %(tenant)s::text AND queue = %(queue)s::text AND status = 'scheduled'
ORDER BY modified_at DESC
LIMIT 10
