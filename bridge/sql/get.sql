-- get: one job by its id
SELECT /*job*/
FROM job
WHERE id = %(id)s::uuid AND tenant = %(tenant)s::text
