-- transaction: which one this connection is in, and what it may see
SELECT current_setting('transaction_isolation') AS isolation, pg_current_xact_id()::text AS id
