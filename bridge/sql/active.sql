-- active: the job that has a unique_key now
SELECT /*job*/
FROM job
WHERE tenant = %(tenant)s::text AND name = %(name)s::text AND unique_key = %(unique_key)s::text
    AND status IN ('new', 'scheduled', 'running', 'retry')
