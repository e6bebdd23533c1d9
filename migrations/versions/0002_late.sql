-- Pending jobs that are cancelled unless they start in time.
CREATE INDEX job_late ON job (tenant, start_before)
    WHERE start_before IS NOT NULL AND status IN ('new', 'scheduled', 'retry');
