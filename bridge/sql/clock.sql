-- clock: the database's time, the only one that decides
SELECT clock_timestamp() AS at
