-- defer: nobody here knows the job, or the broker refuses it; later again, no retry used up
WITH moved AS (
    UPDATE job
    SET status = %(target)s::text, modified_at = clock_timestamp(), lease_until = NULL,
        scheduled_at = greatest(
            date_trunc('milliseconds', clock_timestamp() + %(delay)s::bigint * interval '1 millisecond'),
            scheduled_at + interval '1 millisecond'
        )
    WHERE id = %(id)s::uuid AND tenant = %(tenant)s::text AND status = ANY(%(sources)s::text[])
        AND (%(scheduled_at)s::timestamptz IS NULL OR scheduled_at = %(scheduled_at)s::timestamptz)
    RETURNING id
)
SELECT id FROM moved
