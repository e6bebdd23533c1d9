-- sleep: mark this dispatcher asleep or awake, and forget those not seen for five minutes
WITH gone AS (
    DELETE FROM bridge_dispatcher
    WHERE tenant = %(tenant)s::text AND id <> %(id)s::uuid AND seen_at < clock_timestamp() - interval '5 minutes'
)
INSERT INTO bridge_dispatcher (id, tenant, asleep, seen_at)
VALUES (%(id)s::uuid, %(tenant)s::text, %(asleep)s::boolean, clock_timestamp())
ON CONFLICT (id) DO UPDATE SET asleep = excluded.asleep, seen_at = excluded.seen_at
