-- dedupe_lock: one deduped submit of a name, queue and label at a time; says under which isolation
SELECT
    pg_advisory_xact_lock(
        hashtextextended(concat_ws(E'\x1f', 'bridge dedupe', %(tenant)s::text, %(name)s::text, %(queue)s::text, %(label)s::text), 0)
    )::text AS locked,
    current_setting('transaction_isolation') AS isolation
