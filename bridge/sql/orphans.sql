-- orphans: runs whose lease is over, locked for their end; rows that somebody works on are left for later
SELECT /*job*/
FROM job
WHERE tenant = %(tenant)s::text AND status = 'running' AND lease_until < statement_timestamp()
ORDER BY lease_until
LIMIT %(limit)s::bigint
FOR UPDATE SKIP LOCKED
