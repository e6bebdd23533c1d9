-- isolation: what the transaction of this connection may see
SELECT current_setting('transaction_isolation') AS isolation
