-- insert_many: jobs that differ in their params only, all or none
INSERT INTO job (
    id, tenant, name, queue, label, params, priority, max_retries, scheduled_at, profile_id, resource_id, expires_at,
    start_before, unique_key
)
SELECT
    new.id, %(tenant)s::text, %(name)s::text, %(queue)s::text, %(label)s::text, new.params,
    %(priority)s::integer, %(max_retries)s::integer,
    date_trunc('milliseconds', clock_timestamp() + %(delay)s::bigint * interval '1 millisecond'),
    %(profile_id)s::uuid, %(resource_id)s::uuid,
    clock_timestamp() + %(expires_in)s::bigint * interval '1 millisecond',
    coalesce(%(start_before)s::timestamptz, clock_timestamp() + %(start_in)s::bigint * interval '1 millisecond'),
    %(unique_key)s::text
FROM unnest(%(ids)s::uuid[], %(params)s::jsonb[]) AS new (id, params)
ON CONFLICT (id) DO NOTHING
