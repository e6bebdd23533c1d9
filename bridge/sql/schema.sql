-- schema: what stands in the schema where the tables would be made: our version table, and anything of our names
SELECT
    current_schema() AS name,
    EXISTS (
        SELECT FROM pg_class WHERE relname = 'bridge_version' AND relnamespace = current_schema()::regnamespace
    ) AS versioned,
    (
        SELECT min(typname)
        FROM pg_type
        WHERE typname IN ('job', 'job_event', 'bridge_dispatcher') AND typnamespace = current_schema()::regnamespace
    ) AS taken
