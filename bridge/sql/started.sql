-- started: which of these rows were claimed after a time
SELECT id
FROM job
WHERE id = ANY(%(ids)s::uuid[]) AND started_at > %(after)s::timestamptz
