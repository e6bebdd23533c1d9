-- schema: the version of the tables that this connection sees, and whether a table job is there at all
SELECT
    to_regclass('bridge_version') IS NOT NULL AS versioned,
    to_regclass('job') IS NOT NULL AS has_job
