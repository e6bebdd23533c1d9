-- The ledger: table job (the truth), table job_event (its history), and the wake-up of the dispatchers.

CREATE FUNCTION bridge_uuidv7() RETURNS uuid
    LANGUAGE sql VOLATILE PARALLEL SAFE
    -- RFC 9562 version 7: 48 bits of milliseconds, then version, variant and random bits. PostgreSQL 18 has
    -- uuidv7(); this one gives every version from 14 on the same default.
    AS $$
    SELECT encode(
        set_bit(
            set_bit(
                overlay(
                    uuid_send(gen_random_uuid())
                    PLACING substring(int8send((extract(epoch FROM clock_timestamp()) * 1000)::bigint) FROM 3)
                    FROM 1 FOR 6
                ),
                52, 1
            ),
            53, 1
        ),
        'hex'
    )::uuid
$$;

CREATE FUNCTION bridge_instant(value timestamptz) RETURNS boolean
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    -- What every client can hold: no infinity, no year before 1970 or after 9999.
    AS $$ SELECT value >= '1970-01-01 00:00:00+00' AND value < '10000-01-01 00:00:00+00' $$;

CREATE TABLE job (
    id uuid PRIMARY KEY DEFAULT bridge_uuidv7(),
    tenant text NOT NULL DEFAULT 'default',
    name text NOT NULL,
    queue text NOT NULL DEFAULT 'default',
    label text NOT NULL DEFAULT '',
    params jsonb NOT NULL DEFAULT '{}',
    priority integer NOT NULL DEFAULT 100,
    max_retries integer NOT NULL DEFAULT 3,
    retry_num integer NOT NULL DEFAULT 0,
    status text NOT NULL DEFAULT 'new',
    scheduled_at timestamptz NOT NULL DEFAULT date_trunc('milliseconds', now()),
    created_at timestamptz NOT NULL DEFAULT now(),
    modified_at timestamptz NOT NULL DEFAULT now(),
    started_at timestamptz,
    completed_at timestamptz,
    result jsonb,
    error jsonb,
    profile_id uuid,
    resource_id uuid,
    expires_at timestamptz,
    start_before timestamptz,
    unique_key text,
    run_id uuid,
    worker text,
    lease_until timestamptz,
    retry_lost boolean,
    meta jsonb,

    CONSTRAINT job_tenant_check CHECK (tenant ~ '^[A-Za-z0-9_-]{1,63}$'),
    CONSTRAINT job_name_check CHECK (name ~ '^[^[:cntrl:][:space:]]{1,200}$'),
    CONSTRAINT job_queue_check CHECK (queue ~ '^[A-Za-z0-9_.:-]{1,150}$'),
    CONSTRAINT job_label_check CHECK (char_length(label) <= 250),
    CONSTRAINT job_params_check CHECK (jsonb_typeof(params) = 'object' AND pg_column_size(params) <= 16777216),
    CONSTRAINT job_priority_check CHECK (priority BETWEEN -32768 AND 32767),
    CONSTRAINT job_retries_check CHECK (max_retries BETWEEN 0 AND 100000 AND retry_num BETWEEN 0 AND 100000),
    CONSTRAINT job_status_check CHECK (
        status IN ('new', 'scheduled', 'running', 'retry', 'completed', 'failed', 'cancelled', 'aborted')
    ),
    CONSTRAINT job_times_check CHECK (
        bridge_instant(scheduled_at) AND bridge_instant(created_at) AND bridge_instant(modified_at)
        AND bridge_instant(started_at) AND bridge_instant(completed_at) AND bridge_instant(expires_at)
        AND bridge_instant(start_before) AND bridge_instant(lease_until)
    ),
    CONSTRAINT job_unique_key_check CHECK (char_length(unique_key) BETWEEN 1 AND 250),
    CONSTRAINT job_worker_check CHECK (char_length(worker) <= 300)
);

COMMENT ON TABLE job IS 'One row a job; its status changes only through the bridge (docs/life-of-a-job.md)';
COMMENT ON COLUMN job.scheduled_at IS 'not before; with id it is the ticket on the broker, compared exactly as stored';
COMMENT ON COLUMN job.modified_at IS 'last write; of a scheduled row its hand-over time';
COMMENT ON COLUMN job.lease_until IS 'until when a run holds the row; of a scheduled row, until when a worker holds its message';
COMMENT ON COLUMN job.run_id IS 'the delivery that holds or held the row; fences everything after the claim';

-- What is due, per queue and priority. Its rows leave the index when they are handed over.
CREATE INDEX job_due ON job (tenant, queue, priority, scheduled_at) WHERE status IN ('new', 'retry');
-- The window of handed-over rows, and those handed over long ago.
CREATE INDEX job_handed_over ON job (tenant, queue, modified_at) WHERE status = 'scheduled';
-- Leases, for renewal and for the orphan sweep.
CREATE INDEX job_running ON job (tenant, lease_until) WHERE status = 'running';
-- At most one active row of a key.
CREATE UNIQUE INDEX job_unique_key ON job (tenant, name, unique_key)
    WHERE unique_key IS NOT NULL AND status IN ('new', 'scheduled', 'running', 'retry');

CREATE TABLE job_event (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    job_id uuid NOT NULL REFERENCES job ON DELETE CASCADE,
    kind text NOT NULL,
    payload jsonb NOT NULL DEFAULT '{}',
    actor text NOT NULL DEFAULT '',
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),

    CONSTRAINT job_event_kind_check CHECK (kind IN ('start', 'progress', 'retry', 'end')),
    -- The keys of the contract and no other: never params, results or exception text.
    CONSTRAINT job_event_payload_check CHECK (
        jsonb_typeof(payload) = 'object'
        AND CASE kind
            WHEN 'start' THEN payload - 'attempt' = '{}' AND payload ? 'attempt'
            WHEN 'progress' THEN payload - '{current,total,stage}'::text[] = '{}' AND payload ? 'current'
            WHEN 'retry' THEN payload - '{attempt,reason}'::text[] = '{}' AND payload ?& '{attempt,reason}'
            WHEN 'end' THEN payload - 'outcome' = '{}' AND payload ? 'outcome'
        END
    ),
    CONSTRAINT job_event_actor_check CHECK (char_length(actor) <= 300)
);

COMMENT ON TABLE job_event IS 'The append-only history of every job: who did what when';

CREATE INDEX job_event_job ON job_event (job_id, id);
-- Ends that no worker's own Celery event tells: the dispatchers announce them to Flower.
CREATE INDEX job_event_revoked ON job_event (id)
    WHERE kind = 'end' AND payload ->> 'outcome' IN ('cancelled', 'aborted');

CREATE FUNCTION bridge_append_only() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
BEGIN
    RAISE EXCEPTION 'job_event is append-only: history is not rewritten (it goes with its job)'
        USING ERRCODE = 'restrict_violation';
END
$$;

CREATE TRIGGER job_event_append_only BEFORE UPDATE ON job_event
    FOR EACH STATEMENT EXECUTE FUNCTION bridge_append_only();

CREATE FUNCTION bridge_with_its_job() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
BEGIN
    IF EXISTS (SELECT FROM job WHERE id = OLD.job_id) THEN
        RAISE EXCEPTION 'job_event is append-only: an event goes with its job, not before'
            USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN OLD;
END
$$;

-- A job's own deletion cascades here when its row is gone already.
CREATE TRIGGER job_event_with_its_job BEFORE DELETE ON job_event
    FOR EACH ROW EXECUTE FUNCTION bridge_with_its_job();

-- Who dispatches, and whether it sleeps. Unlogged: after a crash it is empty, and no mark means notify.
CREATE UNLOGGED TABLE bridge_dispatcher (
    id uuid PRIMARY KEY,
    tenant text NOT NULL,
    asleep boolean NOT NULL,
    seen_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX bridge_dispatcher_tenant ON bridge_dispatcher (tenant);

CREATE FUNCTION bridge_wake(tenant text) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER
    -- NOTIFY takes a lock that serialises commits: a busy system, whose dispatchers are all awake, skips it.
    AS $$
BEGIN
    IF EXISTS (SELECT FROM bridge_dispatcher d WHERE d.tenant = bridge_wake.tenant AND d.asleep)
       OR NOT EXISTS (SELECT FROM bridge_dispatcher d WHERE d.tenant = bridge_wake.tenant)
    THEN
        PERFORM pg_notify('bridge_due', bridge_wake.tenant);
    END IF;
END
$$;

CREATE FUNCTION bridge_inserted() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    AS $$
BEGIN
    PERFORM bridge_wake(tenants.tenant) FROM (SELECT DISTINCT tenant FROM inserted) AS tenants;
    RETURN NULL;
END
$$;

-- Whoever may insert runs these two as their owner, so their search_path is fixed, the caller's temporary
-- tables last: a caller's own bridge_dispatcher must not be taken for ours.
DO $$
BEGIN
    EXECUTE format('ALTER FUNCTION bridge_wake(text) SET search_path = %I, pg_temp', current_schema());
    EXECUTE format('ALTER FUNCTION bridge_inserted() SET search_path = %I, pg_temp', current_schema());
END
$$;

CREATE TRIGGER job_inserted AFTER INSERT ON job
    REFERENCING NEW TABLE AS inserted
    FOR EACH STATEMENT EXECUTE FUNCTION bridge_inserted();
