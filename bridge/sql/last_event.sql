-- last_event: where the history of cancelled and aborted jobs ends now
SELECT coalesce(max(id), 0) AS id
FROM job_event
WHERE kind = 'end' AND payload ->> 'outcome' IN ('cancelled', 'aborted')
