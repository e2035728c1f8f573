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

-- The keys of a row's messages, each a hash of topic and key. 0 stands for any key: older clients write none.
ALTER TABLE public.txmq_outbox ADD COLUMN keys int8[] NOT NULL DEFAULT '{0}';
CREATE INDEX txmq_outbox_keys ON public.txmq_outbox USING gin (keys) WITH (fastupdate = off);

-- The floor of each log's outbox: no row below it is there, or can still come. Looks begin there, so that they do not
-- walk over deleted rows that an old snapshot keeps. A floor is inserted and the one before it deleted, never updated:
-- the newest one is thus the first that a look meets. No two floors have the same stamp.
CREATE TABLE public.txmq_outbox_floor (
    log_id uuid,
    seq int8,
    stamp int8 NOT NULL DEFAULT ('x' || substr(replace(gen_random_uuid()::text, '-', ''), 17))::bit(64)::int8,
    PRIMARY KEY (log_id, seq)
);

-- The functions below run as the owner of the tables: who may write a token may also ask whether rows wait, and the
-- number of a row can be mended by each writer.

-- Gives the stamp of the floor where no row waits, none is being written, and none can be hidden by a snapshot: the
-- sequence is read as it is now, and has not passed the floor. Who gets the same stamp twice knows that no row was
-- there in between. 0 where there is no floor yet, and no row; else NULL.
CREATE FUNCTION public.txmq_outbox_stamp(log uuid) RETURNS int8 LANGUAGE plpgsql VOLATILE
SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    floor public.txmq_outbox_floor;
BEGIN
    SELECT * INTO floor FROM public.txmq_outbox_floor WHERE log_id = log ORDER BY seq DESC LIMIT 1;
    IF EXISTS (SELECT FROM public.txmq_outbox WHERE log_id = log AND seq >= coalesce(floor.seq, 0)) THEN
        RETURN NULL;
    END IF;
    IF floor.seq IS NULL THEN
        RETURN 0;
    END IF;
    RETURN (SELECT floor.stamp FROM public.txmq_outbox_seq_seq WHERE NOT is_called OR last_value < floor.seq);
END $$;

-- Whether rows wait for the broker of that log: any, or those with one of the keys. Under a snapshot that may hide such
-- rows the question about keys raises 40001.
CREATE FUNCTION public.txmq_outbox_waits(log uuid, wanted int8[]) RETURNS bool LANGUAGE plpgsql VOLATILE
SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    bound int8 := (SELECT seq FROM public.txmq_outbox_floor WHERE log_id = log ORDER BY seq DESC LIMIT 1);
BEGIN
    IF NOT EXISTS (SELECT FROM public.txmq_outbox WHERE log_id = log AND seq >= coalesce(bound, 0)) THEN
        IF wanted IS NOT NULL AND current_setting('transaction_isolation') IN ('repeatable read', 'serializable')
            AND (SELECT is_called AND last_value >= bound FROM public.txmq_outbox_seq_seq) THEN
            RAISE EXCEPTION 'the snapshot may hide rows of the outbox' USING ERRCODE = 'serialization_failure';
        END IF;
        RETURN false;
    END IF;
    RETURN wanted IS NULL OR EXISTS (
        SELECT FROM public.txmq_outbox WHERE log_id = log AND seq >= coalesce(bound, 0) AND keys && (wanted || 0::int8));
END $$;

-- Gives the floor, raised before if that is worth it: when the outbox is empty, or a thousand numbers further on.
-- A transaction that is still open may have taken a smaller number than those that are committed. It has the lock of a
-- writer then, so the floor is raised only under a lock that no writer has, and that nobody waits for.
-- A raise that is lost in a failover does no harm, so this transaction need not wait for a standby with the lock.
CREATE FUNCTION public.txmq_outbox_settle(log uuid) RETURNS int8 LANGUAGE plpgsql VOLATILE
SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    bound int8 := (SELECT seq FROM public.txmq_outbox_floor WHERE log_id = log ORDER BY seq DESC LIMIT 1);
    lowest int8 := (SELECT seq FROM public.txmq_outbox WHERE log_id = log AND seq >= coalesce(bound, 0)
        ORDER BY seq LIMIT 1);
    following int8 := (SELECT CASE WHEN is_called THEN last_value + 1 ELSE 1 END FROM public.txmq_outbox_seq_seq);
BEGIN
    IF bound IS NULL THEN
        INSERT INTO public.txmq_outbox_floor (log_id, seq) VALUES (log, 0) ON CONFLICT DO NOTHING;
        RETURN 0;
    END IF;
    IF current_setting('transaction_isolation') <> 'read committed'
        OR coalesce(lowest, following) < bound + (CASE WHEN lowest IS NULL THEN 1 ELSE 1000 END) THEN
        RETURN bound;
    END IF;
    PERFORM set_config('synchronous_commit', 'local', true) WHERE current_setting('synchronous_commit') <> 'off';
    BEGIN
        LOCK TABLE public.txmq_outbox IN SHARE MODE NOWAIT;
    EXCEPTION WHEN lock_not_available THEN
        RETURN bound;
    END;
    following := (SELECT CASE WHEN is_called THEN last_value + 1 ELSE 1 END FROM public.txmq_outbox_seq_seq);
    lowest := (SELECT seq FROM public.txmq_outbox WHERE log_id = log AND seq >= bound ORDER BY seq LIMIT 1);
    INSERT INTO public.txmq_outbox_floor (log_id, seq) VALUES (log, coalesce(lowest, following)) ON CONFLICT DO NOTHING;
    IF FOUND THEN
        DELETE FROM public.txmq_outbox_floor WHERE log_id = log AND seq = bound;
    END IF;
    RETURN coalesce(lowest, following);
END $$;

-- Gives a row a number behind the floor and behind the rows that its transaction sees. A sequence is no table: after a
-- logical switch-over the new server's begins anew, before rows that were copied.
CREATE FUNCTION public.txmq_outbox_number() RETURNS trigger LANGUAGE plpgsql VOLATILE
SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    bound int8 := (SELECT seq FROM public.txmq_outbox_floor WHERE log_id = NEW.log_id ORDER BY seq DESC LIMIT 1);
    highest int8 := greatest(bound - 1, (SELECT seq FROM public.txmq_outbox
        WHERE log_id = NEW.log_id AND seq >= coalesce(bound, 0) ORDER BY seq DESC LIMIT 1));
BEGIN
    IF NEW.seq <= highest THEN
        IF (SELECT last_value < highest FROM public.txmq_outbox_seq_seq) THEN
            PERFORM pg_advisory_xact_lock(1954049393, 1);  -- "txmq": two that mend the sequence take turns
            PERFORM setval('public.txmq_outbox_seq_seq', highest) FROM public.txmq_outbox_seq_seq WHERE last_value < highest;
        END IF;
        NEW.seq := nextval('public.txmq_outbox_seq_seq');
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER txmq_outbox_number BEFORE INSERT ON public.txmq_outbox
    FOR EACH ROW EXECUTE FUNCTION public.txmq_outbox_number();
