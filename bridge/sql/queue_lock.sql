-- queue_lock: one dispatcher a queue at a time; the lock ends with the transaction
SELECT
    pg_try_advisory_xact_lock(
        hashtextextended(concat_ws(E'\x1f', 'bridge queue', current_schema(), %(tenant)s::text, %(queue)s::text), 0)
    ) AS locked,
    clock_timestamp() AS at
