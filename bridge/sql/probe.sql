-- probe: a write like a renewal's, of no row: does PostgreSQL let anybody renew?
UPDATE job SET lease_until = lease_until WHERE false
