-- insert: a new job; repeated after a lost answer it changes nothing
INSERT INTO job (
    id, tenant, name, queue, label, params, priority, max_retries, scheduled_at, profile_id, resource_id, expires_at
)
VALUES (
    %(id)s::uuid, %(tenant)s::text, %(name)s::text, %(queue)s::text, %(label)s::text, %(params)s::jsonb,
    %(priority)s::integer, %(max_retries)s::integer,
    date_trunc('milliseconds', clock_timestamp() + %(delay)s::bigint * interval '1 millisecond'),
    %(profile_id)s::uuid, %(resource_id)s::uuid,
    clock_timestamp() + %(expires_in)s::bigint * interval '1 millisecond'
)
ON CONFLICT (id) DO NOTHING
