-- insert: a new job; nothing if it is there already, by a statement whose answer was lost, or its key is taken
INSERT INTO job (
    id, tenant, name, queue, label, params, priority, max_retries, scheduled_at, profile_id, resource_id, expires_at,
    start_before, unique_key
)
VALUES (
    %(id)s::uuid, %(tenant)s::text, %(name)s::text, %(queue)s::text, %(label)s::text, %(params)s::jsonb,
    %(priority)s::integer, %(max_retries)s::integer,
    date_trunc('milliseconds', clock_timestamp() + %(delay)s::bigint * interval '1 millisecond'),
    %(profile_id)s::uuid, %(resource_id)s::uuid,
    clock_timestamp() + %(expires_in)s::bigint * interval '1 millisecond',
    coalesce(%(start_before)s::timestamptz, clock_timestamp() + %(start_in)s::bigint * interval '1 millisecond'),
    %(unique_key)s::text
)
ON CONFLICT DO NOTHING
