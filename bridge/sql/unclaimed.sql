-- unclaimed: handed-over rows that nobody claimed or held since a time, oldest first
SELECT id, modified_at
FROM job
WHERE tenant = %(tenant)s::text AND queue = %(queue)s::text AND status = 'scheduled'
    AND modified_at < %(before)s::timestamptz
    AND (lease_until IS NULL OR lease_until < statement_timestamp())
ORDER BY modified_at, id
