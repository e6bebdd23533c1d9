-- lost: handed-over rows that nobody holds and that the broker cannot have, oldest first
SELECT id, count(*) OVER () AS total
FROM job
WHERE tenant = %(tenant)s::text AND queue = %(queue)s::text AND status = 'scheduled'
    AND modified_at < %(before)s::timestamptz
ORDER BY modified_at, id
