-- Version 4. Identity: of a topic and its log in the inbox, of the broker that works on this database, of a row of the
-- outbox.

-- The inbox. It knows a message by its log and its topic's id: the names of topics and brokers come back with other
-- messages. The old claim goes, so that an older txmq fails instead of applying messages that it does not find.

LOCK TABLE public.txmq_inbox_recent, public.txmq_inbox;  -- waits for the handlers that have begun
DROP FUNCTION public.txmq_claim(text, text, int, int8, int8, int8[]);

-- What was stored before, by names. The first member that gets the partition takes it over (txmq_inbox_adopt).
-- With several brokers the group was named group#log.
CREATE TABLE public.txmq_inbox_by_name (
    grp text NOT NULL,
    log_id uuid,
    topic text NOT NULL,
    partition int NOT NULL,
    epoch int8 NOT NULL,
    applied int8multirange NOT NULL,
    stored_until timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX ON public.txmq_inbox_by_name (grp, topic, partition);
INSERT INTO public.txmq_inbox_by_name (grp, log_id, topic, partition, epoch, applied)
SELECT regexp_replace(grp, '#[0-9a-f-]{36}$', ''), substring(grp FROM '#([0-9a-f-]{36})$')::uuid, topic, partition,
    epoch, range_agg(r)
FROM (
    SELECT grp, topic, partition, epoch, unnest(applied) AS r FROM public.txmq_inbox
    UNION ALL
    SELECT grp, topic, partition, epoch, int8range("offset", "offset" + 1) FROM public.txmq_inbox_recent) stored
GROUP BY 1, 2, 3, 4, 5;

TRUNCATE public.txmq_inbox_recent, public.txmq_inbox;
ALTER TABLE public.txmq_inbox_recent
    DROP COLUMN topic, ADD COLUMN log_id uuid, ADD COLUMN topic_id int8,
    ADD PRIMARY KEY (grp, log_id, topic_id, partition, epoch, "offset");
ALTER TABLE public.txmq_inbox
    DROP COLUMN topic, ADD COLUMN log_id uuid, ADD COLUMN topic_id int8,
    ADD PRIMARY KEY (grp, log_id, topic_id, partition, epoch);

-- The run of the broker that the newest of the effects are of: a member notes it before it applies messages of that run.
ALTER TABLE public.txmq_inbox ADD COLUMN run uuid;

-- Whoever may write to the inbox may take over what it had.
DO $$
DECLARE
    member text;
BEGIN
    FOR member IN
        SELECT DISTINCT CASE grantee WHEN 0 THEN 'public' ELSE quote_ident(pg_get_userbyid(grantee)) END
        FROM pg_class, aclexplode(relacl) WHERE oid = 'public.txmq_inbox'::regclass AND privilege_type = 'INSERT'
    LOOP
        EXECUTE format('GRANT SELECT, DELETE ON public.txmq_inbox_by_name TO %s', member);
    END LOOP;
END $$;

-- Takes over the rows of a group ($1), topic ($2) and partition ($3) that were stored by name, for log $4, topic id $5
-- and epoch $6. Rows do not tell the topic they are of. A topic that was made ($7) after them is not theirs. They are
-- taken if the group has settled the first of their messages, and been delivered the last: it is at offsets $8 and $9.
-- Otherwise that is unclear, unless an operator has said so ($7 to $9 are null). $10 is the lock of the position.
-- Returns 'none', 'adopted' or 'unclear'.
CREATE FUNCTION public.txmq_inbox_adopt(text, text, int, uuid, int8, int8, timestamptz, int8, int8, int8) RETURNS text
LANGUAGE plpgsql AS $$
BEGIN
    IF NOT EXISTS (
        SELECT FROM public.txmq_inbox_by_name
        WHERE grp = $1 AND topic = $2 AND partition = $3 AND coalesce(log_id, $4) = $4 AND epoch = $6
            AND stored_until >= coalesce($7, '-infinity')) THEN
        RETURN 'none';
    END IF;
    PERFORM pg_advisory_xact_lock($10);
    IF EXISTS (
        SELECT FROM public.txmq_inbox_by_name
        WHERE grp = $1 AND topic = $2 AND partition = $3 AND coalesce(log_id, $4) = $4 AND epoch = $6
            AND (lower(applied) >= $8 OR upper(applied) > $9)) THEN
        RETURN 'unclear';
    END IF;
    WITH mine AS (
        DELETE FROM public.txmq_inbox_by_name
        WHERE grp = $1 AND topic = $2 AND partition = $3 AND coalesce(log_id, $4) = $4 AND epoch = $6
        RETURNING applied
    )
    INSERT INTO public.txmq_inbox AS known (grp, log_id, topic_id, partition, epoch, applied)
    SELECT $1, $4, $5, $3, $6, range_agg(r) FROM mine, unnest(applied) r HAVING count(*) > 0
    ON CONFLICT (grp, log_id, topic_id, partition, epoch) DO UPDATE SET applied = known.applied + EXCLUDED.applied;
    RETURN 'adopted';
END $$;

-- Gives those of the offsets ($7, ascending) that nobody has applied, as in version 3. $1 to $5 are the position, $6 is
-- its lock.
CREATE FUNCTION public.txmq_claim(text, uuid, int8, int, int8, int8, int8[]) RETURNS SETOF int8
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    PERFORM pg_advisory_xact_lock_shared($6);
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        $7 := ARRAY(
            SELECT o FROM unnest($7) o
            WHERE (
                SELECT true FROM public.txmq_inbox_recent
                WHERE grp = $1 AND log_id = $2 AND topic_id = $3 AND partition = $4 AND epoch = $5
                    AND "offset" = o) IS NULL);
    END IF;
    IF cardinality($7) = 1 THEN
        INSERT INTO public.txmq_inbox_recent (grp, log_id, topic_id, partition, epoch, "offset")
        SELECT $1, $2, $3, $4, $5, $7[1]
        WHERE (
            SELECT applied @> $7[1] FROM public.txmq_inbox
            WHERE grp = $1 AND log_id = $2 AND topic_id = $3 AND partition = $4 AND epoch = $5) IS NOT TRUE
        ON CONFLICT DO NOTHING;
        IF FOUND THEN
            RETURN NEXT $7[1];
        END IF;
        RETURN;
    END IF;
    RETURN QUERY
    INSERT INTO public.txmq_inbox_recent (grp, log_id, topic_id, partition, epoch, "offset")
    SELECT $1, $2, $3, $4, $5, o FROM unnest($7) o
    WHERE ((
        SELECT applied * int8multirange(int8range($7[1], $7[cardinality($7)], '[]')) FROM public.txmq_inbox
        WHERE grp = $1 AND log_id = $2 AND topic_id = $3 AND partition = $4 AND epoch = $5) @> o) IS NOT TRUE
    ON CONFLICT DO NOTHING RETURNING "offset";
END $$;

-- The brokers.

-- The lease: which data directory of the log's copies works on this database, since which boot epoch of its broker.
-- reports counts the reports, so that a broker notices a database that does not hold its last one. directory_reports
-- counts those that the directory remembers, so that it notices another copy of itself.
-- NULL: of a broker of an older version, or given free; the first that comes takes it.
ALTER TABLE public.txmq_broker
    ADD COLUMN boot_epoch int8,
    ADD COLUMN directory uuid,
    ADD COLUMN reports int8 NOT NULL DEFAULT 0,
    ADD COLUMN directory_reports int8 NOT NULL DEFAULT 0,
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
-- It is called in each transaction, and setting a search path takes as long as a look: operators are qualified instead.
-- So does a scan of the sequence, or a query in place of an expression: they took 13 of 80 µs of the token's row.
CREATE FUNCTION public.txmq_outbox_stamp(log uuid) RETURNS int8 LANGUAGE plpgsql VOLATILE SECURITY DEFINER AS $$
DECLARE
    stamp int8;
BEGIN
    SELECT floor.stamp INTO stamp
    FROM (SELECT * FROM public.txmq_outbox_floor
        WHERE log_id OPERATOR(pg_catalog.=) log ORDER BY seq DESC LIMIT 1) floor
    WHERE coalesce(pg_catalog.pg_sequence_last_value('public.txmq_outbox_seq_seq'), -1) OPERATOR(pg_catalog.<) floor.seq
        AND (SELECT true FROM public.txmq_outbox
            WHERE log_id OPERATOR(pg_catalog.=) log AND seq OPERATOR(pg_catalog.>=) floor.seq LIMIT 1) IS NULL;
    IF FOUND THEN
        RETURN stamp;
    END IF;
    RETURN (
        SELECT 0
        WHERE NOT EXISTS (SELECT FROM public.txmq_outbox_floor WHERE log_id OPERATOR(pg_catalog.=) log)
            AND NOT EXISTS (SELECT FROM public.txmq_outbox WHERE log_id OPERATOR(pg_catalog.=) log));
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
    IF current_setting('transaction_isolation') <> 'read committed'
        OR coalesce(lowest, following) < bound + (CASE WHEN lowest IS NULL THEN 1 ELSE 1000 END) THEN
        RETURN coalesce(bound, 0);
    END IF;
    PERFORM set_config('synchronous_commit', 'local', true) WHERE current_setting('synchronous_commit') <> 'off';
    BEGIN
        LOCK TABLE public.txmq_outbox IN SHARE MODE NOWAIT;
    EXCEPTION WHEN lock_not_available THEN
        IF bound IS NULL THEN
            INSERT INTO public.txmq_outbox_floor (log_id, seq) VALUES (log, 0) ON CONFLICT DO NOTHING;
        END IF;
        RETURN coalesce(bound, 0);
    END;
    following := (SELECT CASE WHEN is_called THEN last_value + 1 ELSE 1 END FROM public.txmq_outbox_seq_seq);
    lowest := (SELECT seq FROM public.txmq_outbox WHERE log_id = log AND seq >= coalesce(bound, 0)
        ORDER BY seq LIMIT 1);
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

-- Messages by SQL.

-- Sends a message if the transaction commits, by way of the outbox, and returns the token of its bundle. For triggers
-- and psql. It runs with the caller's rights. A row that no broker can publish would hold up all rows behind it, so
-- what can be judged here is. Where several brokers work on the database, log_id names one.
-- A crash may not take back a row that a broker has seen: the commit is made synchronous.
CREATE FUNCTION public.txmq_send(topic text, key text, body bytea, headers jsonb DEFAULT NULL, log_id uuid DEFAULT NULL)
RETURNS uuid LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    logs uuid[] := ARRAY(SELECT broker.log_id FROM public.txmq_broker broker
        WHERE broker.forgotten_at IS NULL AND broker.log_id = coalesce($5, broker.log_id));
    born timestamptz := clock_timestamp();
    token uuid := overlay(overlay(replace(gen_random_uuid()::text, '-', '')
        PLACING lpad(to_hex((extract(epoch FROM born) * 1000)::int8), 12, '0') FROM 1) PLACING '7' FROM 13)::uuid;
BEGIN
    IF $1 IS NULL OR $1 !~ '^[A-Za-z0-9_-][A-Za-z0-9._-]{0,126}$' THEN
        RAISE EXCEPTION 'txmq.send: invalid topic name %', quote_nullable(left($1, 127)) USING ERRCODE = '22023',
            HINT = 'use 1 to 127 characters of A-Z a-z 0-9 . _ -, not beginning with a dot';
    END IF;
    IF octet_length($2) > 1024 THEN
        RAISE EXCEPTION 'txmq.send: a key of % bytes exceeds the limit of 1024', octet_length($2)
            USING ERRCODE = '22023';
    END IF;
    IF $3 IS NULL OR octet_length($3) > 4194304 THEN
        RAISE EXCEPTION 'txmq.send: a body of % bytes is not accepted', coalesce(octet_length($3)::text, 'NULL')
            USING ERRCODE = '22023', HINT = 'give up to 4194304 bytes';
    END IF;
    IF jsonb_typeof($4) <> 'object' OR octet_length($4::text) > 32768
        OR EXISTS (SELECT FROM jsonb_each(CASE jsonb_typeof($4) WHEN 'object' THEN $4 END) header
            WHERE jsonb_typeof(header.value) <> 'string')
        OR (SELECT count(*) > 64 FROM jsonb_each(CASE jsonb_typeof($4) WHEN 'object' THEN $4 END)) THEN
        RAISE EXCEPTION 'txmq.send: invalid headers' USING ERRCODE = '22023',
            HINT = 'give an object of up to 64 strings, up to 32768 bytes in all';
    END IF;
    IF cardinality(logs) <> 1 THEN
        RAISE EXCEPTION 'txmq.send: % brokers work on this database%', cardinality(logs),
            CASE WHEN $5 IS NULL THEN '' ELSE format(' for log %s', $5) END
            USING ERRCODE = '55000', HINT = CASE WHEN cardinality(logs) > 1
                THEN 'name the log: txmq.send(topic, key, body, headers, log_id); see txmq schema brokers DSN'
                ELSE 'name this database under [[resolver]] in the broker''s settings' END;
    END IF;
    IF current_setting('synchronous_commit') IN ('off', 'local', 'remote_write') THEN
        PERFORM set_config('synchronous_commit', 'on', true);
    END IF;
    INSERT INTO public.txmq_token (tok, log_id) VALUES (token, logs[1]);
    INSERT INTO public.txmq_outbox (log_id, tok, service, messages, content)
    VALUES (logs[1], token, 'sql', 1, convert_to(jsonb_build_object(
        'topic', $1, 'key', nullif($2, ''), 'headers', coalesce($4, '{}'), 'body', encode($3, 'base64'),
        'born_at', (extract(epoch FROM born) * 1000000)::int8)::text, 'UTF8'));
    RETURN token;
END $$;
-- The same as txmq.send, with a body of bytes or of text, where the installing role may make a schema.
DO $$ BEGIN
    IF has_database_privilege(current_database(), 'CREATE') THEN
        CREATE SCHEMA IF NOT EXISTS txmq;
        GRANT USAGE ON SCHEMA txmq TO PUBLIC;
        CREATE FUNCTION txmq.send(topic text, key text, body bytea, headers jsonb DEFAULT NULL, log_id uuid DEFAULT NULL)
        RETURNS uuid LANGUAGE sql VOLATILE AS 'SELECT public.txmq_send($1, $2, $3, $4, $5)';
        CREATE FUNCTION txmq.send(topic text, key text, body text, headers jsonb DEFAULT NULL, log_id uuid DEFAULT NULL)
        RETURNS uuid LANGUAGE sql VOLATILE AS 'SELECT public.txmq_send($1, $2, convert_to($3, ''UTF8''), $4, $5)';
    END IF;
END $$;

-- The token.

-- The system identifier. A backend serves one cluster for as long as it lives, and plans live no longer: IMMUTABLE lets
-- them hold the result, since the control file is read from the disk.
CREATE FUNCTION public.txmq_system_id() RETURNS int8 LANGUAGE sql IMMUTABLE
AS 'SELECT system_identifier FROM pg_control_system()';

-- Writes the token's row for one log, and returns the transaction's circumstances: synchronous_commit (NULL for on),
-- whether it is deferrable, which is the mark of a caller's block, the boot epoch in which the log's broker has last
-- reported, the outbox's stamp, the system identifier, and timeline and position of the write-ahead log.
-- It is a function so that each session keeps the plans, behind a pooler too. An array costs less than columns.
-- COMMIT warns that no synchronous standby has confirmed it, so warnings are let through.
CREATE FUNCTION public.txmq_token_insert(uuid, uuid) RETURNS text[] LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    reported int8;
BEGIN
    INSERT INTO public.txmq_token (tok, log_id) VALUES ($1, $2);
    IF current_setting('client_min_messages') = 'error' THEN
        PERFORM set_config('client_min_messages', 'warning', true);
    END IF;
    SELECT boot_epoch INTO reported FROM public.txmq_broker WHERE log_id = $2;
    RETURN ARRAY[nullif(current_setting('synchronous_commit'), 'on'), current_setting('transaction_deferrable'),
        reported::text, public.txmq_outbox_stamp($2)::text,
        public.txmq_system_id()::text, left(pg_walfile_name(pg_current_wal_flush_lsn()), 8),
        pg_current_wal_flush_lsn()::text];
END $$;
