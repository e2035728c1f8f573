-- Version 4. Identity: of a topic and its log in the inbox, of the broker that works on this database, of a row of the
-- outbox.

-- The inbox.

SELECT;

-- The brokers.

-- The lease: which data directory of the log's copies works on this database, since which boot epoch of its broker.
-- reports counts the reports, so that a broker notices a database that does not hold its last one.
-- NULL: of a broker of an older version, or given free; the first that comes takes it.
ALTER TABLE public.txmq_broker
    ADD COLUMN boot_epoch int8,
    ADD COLUMN directory uuid,
    ADD COLUMN reports int8 NOT NULL DEFAULT 0,
    ADD COLUMN lease_reason text;

-- The history of a timeline: where its predecessors ended. A role needs the right to read files of the server for it,
-- which the function has where a superuser owns it.
CREATE FUNCTION public.txmq_timeline_history(int) RETURNS text LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog
AS $$ SELECT pg_read_file('pg_wal/' || lpad(upper(to_hex($1)), 8, '0') || '.history') $$;

-- The outbox.

SELECT;
