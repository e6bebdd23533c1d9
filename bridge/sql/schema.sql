-- schema: what stands in the schema where the tables would be made: our version table, and any table job
SELECT
    current_schema() AS name,
    EXISTS (
        SELECT FROM pg_class WHERE relname = 'bridge_version' AND relnamespace = current_schema()::regnamespace
    ) AS versioned,
    EXISTS (
        SELECT FROM pg_class WHERE relname = 'job' AND relnamespace = current_schema()::regnamespace
    ) AS has_job
