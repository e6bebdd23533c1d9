-- dispatch: the due rows of a queue, best priority first, as far as the window has room
WITH RECURSIVE room AS (
    SELECT greatest(least(%(window)s::bigint - count(*), %(batch)s::bigint), 0) AS free
    FROM job
    WHERE tenant = %(tenant)s::text AND queue = %(queue)s::text AND status = 'scheduled'
), level AS (
    (
        SELECT priority
        FROM job
        WHERE tenant = %(tenant)s::text AND queue = %(queue)s::text AND status IN ('new', 'retry')
        ORDER BY priority DESC
        LIMIT 1
    )
    UNION ALL
    SELECT next.priority
    FROM level
    CROSS JOIN LATERAL (
        SELECT job.priority
        FROM job
        WHERE job.tenant = %(tenant)s::text AND job.queue = %(queue)s::text AND job.status IN ('new', 'retry')
            AND job.priority < level.priority
        ORDER BY job.priority DESC
        LIMIT 1
    ) AS next
), due AS (
    SELECT found.id
    FROM level
    CROSS JOIN LATERAL (
        SELECT job.id
        FROM job
        WHERE job.tenant = %(tenant)s::text AND job.queue = %(queue)s::text AND job.priority = level.priority
            AND job.status IN ('new', 'retry') AND job.scheduled_at <= statement_timestamp()
        ORDER BY job.scheduled_at
        LIMIT (SELECT free FROM room)
        FOR UPDATE SKIP LOCKED
    ) AS found
    LIMIT (SELECT free FROM room)
), moved AS (
    UPDATE job
    SET status = %(target)s::text, modified_at = statement_timestamp(), lease_until = NULL
    FROM due
    WHERE job.id = due.id AND job.status = ANY(%(sources)s::text[])
    RETURNING job.id, job.scheduled_at, job.name, job.queue, job.retry_num, job.priority
)
SELECT moved.id, moved.scheduled_at, moved.name, moved.queue, moved.retry_num, room.free
FROM room
LEFT JOIN moved ON true
ORDER BY moved.priority DESC, moved.scheduled_at, moved.id
