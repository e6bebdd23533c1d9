-- version: the version of the tables
SELECT version_num AS version FROM bridge_version
