-- dedupe: forget the equal jobs that wait for a later time and never started
DELETE FROM job
WHERE tenant = %(tenant)s::text AND name = %(name)s::text AND queue = %(queue)s::text AND label = %(label)s::text
    AND status = 'new' AND scheduled_at > statement_timestamp() AND started_at IS NULL
    AND id <> %(id)s::uuid
