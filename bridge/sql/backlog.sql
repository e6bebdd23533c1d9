-- backlog: the queues that hold pending rows, each with its earliest due time, found by skipping through job_due
WITH RECURSIVE level AS (
    (
        SELECT queue, priority
        FROM job
        WHERE tenant = %(tenant)s::text AND status IN ('new', 'retry')
        ORDER BY queue DESC, priority DESC
        LIMIT 1
    )
    UNION ALL
    SELECT next.queue, next.priority
    FROM level
    CROSS JOIN LATERAL (
        SELECT job.queue, job.priority
        FROM job
        WHERE job.tenant = %(tenant)s::text AND job.status IN ('new', 'retry')
            AND (job.queue, job.priority) < (level.queue, level.priority)
        ORDER BY job.queue DESC, job.priority DESC
        LIMIT 1
    ) AS next
)
SELECT level.queue, extract(epoch FROM min(first.scheduled_at) - clock_timestamp())::float8 AS due_in
FROM level
CROSS JOIN LATERAL (
    SELECT job.scheduled_at
    FROM job
    WHERE job.tenant = %(tenant)s::text AND job.queue = level.queue AND job.priority = level.priority
        AND job.status IN ('new', 'retry')
    ORDER BY job.scheduled_at
    LIMIT 1
) AS first
GROUP BY level.queue
ORDER BY 2
