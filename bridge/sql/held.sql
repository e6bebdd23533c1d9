-- held: the row that a run holds, if it still does
SELECT /*job*/
FROM job
WHERE id = %(id)s::uuid AND tenant = %(tenant)s::text AND run_id = %(run)s::uuid AND status = 'running'
