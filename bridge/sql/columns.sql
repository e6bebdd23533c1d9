-- columns: a Job's fields; JSON as text, because psycopg's jsonb loading fails on absurd numbers and depths
id, tenant, name, queue, label, params::text AS params_text, priority, max_retries, retry_num, status,
scheduled_at, created_at, modified_at, started_at, completed_at, result::text AS result, error::text AS error,
profile_id, resource_id, expires_at, start_before, unique_key, run_id, worker, lease_until, retry_lost,
meta::text AS meta
