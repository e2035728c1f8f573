-- Version 1 of txmq's tables and functions. ASCII only: it is installed into databases of any encoding.
--
-- What another role puts in the way counts nowhere. The installation has pg_catalog alone on its search path. In the
-- functions, which run later, each table, function and type is named with its schema, or is a keyword, such as bigint.
-- Those that run as the owner have a search path of their own. What is called in each transaction names the schema of
-- operators instead, because setting a search path takes as long as a look at a table. Nobody may call a function who was not given the right.

CREATE TABLE public.txmq_schema (
    one boolean PRIMARY KEY DEFAULT true CHECK (one),
    version integer NOT NULL,
    installed_at timestamptz NOT NULL DEFAULT now()
);


-- Tokens.

-- One row per transaction and participating broker: the proof that the transaction committed.
-- state: C committed, D committed and decided so by a resolver, R fenced: decided as rolled back, the producer's own
-- row can never come. A UUIDv7 sorts by its time, so that a range is a span of time and everything about a token meets
-- in one partition.
CREATE TABLE public.txmq_token (
    tok uuid,
    log_id uuid,
    xid xid8 NOT NULL DEFAULT pg_current_xact_id(),
    state "char" NOT NULL DEFAULT 'C',
    at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (tok, log_id)
) PARTITION BY RANGE (tok);

-- For tokens whose partition is yet to be made: of a producer whose clock is ahead, or while nobody makes partitions.
CREATE TABLE public.txmq_token_default PARTITION OF public.txmq_token DEFAULT;

-- For tokens from before the first day that is kept: refused, so that nobody fences a token whose row was dropped.
DO $$
DECLARE
    yesterday_ms bigint := (floor(EXTRACT(epoch FROM now()) / 86400)::bigint - 1) * 86400000;
BEGIN
    EXECUTE format(
        'CREATE TABLE public.txmq_token_closed PARTITION OF public.txmq_token'
        ' (CONSTRAINT txmq_token_too_old CHECK (false))'
        ' FOR VALUES FROM (MINVALUE) TO (%L)', (lpad(to_hex(yesterday_ms), 12, '0') || repeat('0', 20))::uuid);
END $$;

-- The system identifier. A backend serves one cluster for as long as it lives, and plans live no longer: IMMUTABLE lets
-- them hold the result, since the control file is read from the disk.
CREATE FUNCTION public.txmq_system_id() RETURNS bigint LANGUAGE sql IMMUTABLE
AS 'SELECT system_identifier FROM pg_catalog.pg_control_system()';

-- Writes the token's row for one log, and returns the transaction's circumstances: synchronous_commit, whether it is
-- deferrable, which is the mark of a caller's block, the boot epoch in which the log's broker has last reported, the
-- outbox's stamp, the system identifier, and timeline and position of the write-ahead log.
-- It is a function so that each session keeps the plans, behind a pooler too. An array costs less than columns.
-- COMMIT warns that no synchronous standby has confirmed it, so warnings are let through.
CREATE FUNCTION public.txmq_token_insert(uuid, uuid) RETURNS text[] LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    reported bigint;
BEGIN
    INSERT INTO public.txmq_token (tok, log_id) VALUES ($1, $2);
    IF pg_catalog.current_setting('client_min_messages') OPERATOR(pg_catalog.=) 'error' THEN
        PERFORM pg_catalog.set_config('client_min_messages', 'warning', true);
    END IF;
    SELECT boot_epoch INTO reported FROM public.txmq_broker WHERE log_id OPERATOR(pg_catalog.=) $2;
    RETURN ARRAY[pg_catalog.current_setting('synchronous_commit'), pg_catalog.current_setting('transaction_deferrable'),
        reported::pg_catalog.text, public.txmq_outbox_stamp($2)::pg_catalog.text,
        public.txmq_system_id()::pg_catalog.text,
        pg_catalog.left(pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_flush_lsn()), 8),
        pg_catalog.pg_current_wal_flush_lsn()::pg_catalog.text];
END $$;

-- The history of a timeline: where its predecessors ended. A role needs the right to read files of the server for it,
-- which the function has where a superuser owns it.
CREATE FUNCTION public.txmq_timeline_history(integer) RETURNS text LANGUAGE sql
SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT pg_catalog.pg_read_file(
        'pg_wal/' || pg_catalog.lpad(pg_catalog.upper(pg_catalog.to_hex($1)), 8, '0') || '.history')
$$;


-- The brokers that this database decides for.

-- What each broker has reported of itself: rows of tokens go when no broker has an undecided group as old any more.
-- oldest_undecided is NULL where everything is decided. A broker that is forgotten holds nothing up; should it report
-- again, it is back.
-- The row is the lease, too: which data directory of the log's copies works on this database, since which boot epoch of
-- its broker. Without a directory the first that comes takes the lease; without a boot epoch an operator has given it.
-- reports counts the reports, so that a broker notices a database that does not hold its last one. directory_reports
-- counts those that the directory remembers, so that it notices another copy of itself.
CREATE TABLE public.txmq_broker (
    log_id uuid PRIMARY KEY,
    name text NOT NULL,
    oldest_undecided uuid,
    reported_at timestamptz NOT NULL,
    forgotten_at timestamptz,
    forgotten_reason text,
    boot_epoch bigint,
    directory uuid,
    reports bigint NOT NULL DEFAULT 0,
    directory_reports bigint NOT NULL DEFAULT 0,
    lease_reason text
);


-- The outbox.

-- Transactions whose messages their broker is yet to fetch, in the order of seq; content as docs/FORMATS.md has it.
-- keys has those of the messages, each a hash of topic and key. 0 stands for any key.
CREATE TABLE public.txmq_outbox (
    log_id uuid,
    seq bigint GENERATED ALWAYS AS IDENTITY,
    tok uuid NOT NULL,
    service text NOT NULL,
    messages integer NOT NULL,
    content bytea NOT NULL,
    at timestamptz NOT NULL DEFAULT now(),
    keys bigint[] NOT NULL DEFAULT '{}',
    PRIMARY KEY (log_id, seq)
);
CREATE INDEX txmq_outbox_keys ON public.txmq_outbox USING gin (keys) WITH (fastupdate = off);

-- The floor of each log's outbox: no row below it is there, or can still come. Looks begin there, so that they do not
-- walk over deleted rows that an old snapshot keeps. A floor is inserted and the one before it deleted, never updated:
-- the newest one is thus the first that a look meets. No two floors have the same stamp.
CREATE TABLE public.txmq_outbox_floor (
    log_id uuid,
    seq bigint,
    stamp bigint NOT NULL DEFAULT ('x' || substr(replace(gen_random_uuid()::text, '-', ''), 17))::bit(64)::bigint,
    PRIMARY KEY (log_id, seq)
);

-- The functions of the outbox run as the owner of the tables: who may write a token may also ask whether rows wait, and
-- the number of a row can be mended by each writer.

-- Gives the stamp of the floor where no row waits, none is being written, and none can be hidden by a snapshot: the
-- sequence is read as it is now, and has not passed the floor. Who gets the same stamp twice knows that no row was
-- there in between. 0 where there is no floor yet, and no row; else NULL.
-- It is called in each transaction: a scan of the sequence, a query in place of an expression, or a search path of its
-- own would each take a tenth of the time of the token's row. So it names the schema of operators, too.
CREATE FUNCTION public.txmq_outbox_stamp(log uuid) RETURNS bigint LANGUAGE plpgsql VOLATILE SECURITY DEFINER AS $$
DECLARE
    stamp bigint;
BEGIN
    SELECT floor.stamp INTO stamp
    FROM (
        SELECT known.seq, known.stamp FROM public.txmq_outbox_floor known
        WHERE known.log_id OPERATOR(pg_catalog.=) log ORDER BY known.seq DESC LIMIT 1
    ) floor
    WHERE COALESCE(pg_catalog.pg_sequence_last_value('public.txmq_outbox_seq_seq'), '-1')
            OPERATOR(pg_catalog.<) floor.seq
        AND (
            SELECT true FROM public.txmq_outbox
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
CREATE FUNCTION public.txmq_outbox_waits(log uuid, wanted bigint[]) RETURNS boolean LANGUAGE plpgsql VOLATILE
SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    bound bigint := (SELECT seq FROM public.txmq_outbox_floor WHERE log_id = log ORDER BY seq DESC LIMIT 1);
BEGIN
    IF NOT EXISTS (SELECT FROM public.txmq_outbox WHERE log_id = log AND seq >= COALESCE(bound, 0)) THEN
        IF wanted IS NOT NULL
            AND pg_catalog.current_setting('transaction_isolation') IN ('repeatable read', 'serializable')
            AND (SELECT is_called AND last_value >= bound FROM public.txmq_outbox_seq_seq) THEN
            RAISE EXCEPTION 'the snapshot may hide rows of the outbox' USING ERRCODE = 'serialization_failure';
        END IF;
        RETURN false;
    END IF;
    RETURN wanted IS NULL OR EXISTS (
        SELECT FROM public.txmq_outbox
        WHERE log_id = log AND seq >= COALESCE(bound, 0) AND keys && wanted);
END $$;

-- Gives the floor, raised before if that is worth it: when the outbox is empty, or a thousand numbers further on.
-- A transaction that is still open may have taken a smaller number than those that are committed. It has the lock of a
-- writer then, so the floor is raised only under a lock that no writer has, and that nobody waits for.
-- A raise that is lost in a failover does no harm, so this transaction need not wait for a standby with the lock.
CREATE FUNCTION public.txmq_outbox_settle(log uuid) RETURNS bigint LANGUAGE plpgsql VOLATILE
SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    bound bigint := (SELECT seq FROM public.txmq_outbox_floor WHERE log_id = log ORDER BY seq DESC LIMIT 1);
    lowest bigint := (SELECT seq FROM public.txmq_outbox WHERE log_id = log AND seq >= COALESCE(bound, 0)
        ORDER BY seq LIMIT 1);
    following bigint := (SELECT CASE WHEN is_called THEN last_value + 1 ELSE 1 END FROM public.txmq_outbox_seq_seq);
BEGIN
    IF pg_catalog.current_setting('transaction_isolation') <> 'read committed'
        OR COALESCE(lowest, following) < bound + (CASE WHEN lowest IS NULL THEN 1 ELSE 1000 END) THEN
        RETURN COALESCE(bound, 0);
    END IF;
    PERFORM pg_catalog.set_config('synchronous_commit', 'local', true)
    WHERE pg_catalog.current_setting('synchronous_commit') <> 'off';
    BEGIN
        LOCK TABLE public.txmq_outbox IN SHARE MODE NOWAIT;
    EXCEPTION WHEN lock_not_available THEN
        IF bound IS NULL THEN
            INSERT INTO public.txmq_outbox_floor (log_id, seq) VALUES (log, 0) ON CONFLICT DO NOTHING;
        END IF;
        RETURN COALESCE(bound, 0);
    END;
    following := (SELECT CASE WHEN is_called THEN last_value + 1 ELSE 1 END FROM public.txmq_outbox_seq_seq);
    lowest := (SELECT seq FROM public.txmq_outbox WHERE log_id = log AND seq >= COALESCE(bound, 0)
        ORDER BY seq LIMIT 1);
    INSERT INTO public.txmq_outbox_floor (log_id, seq) VALUES (log, COALESCE(lowest, following)) ON CONFLICT DO NOTHING;
    IF FOUND THEN
        DELETE FROM public.txmq_outbox_floor WHERE log_id = log AND seq = bound;
    END IF;
    RETURN COALESCE(lowest, following);
END $$;

-- Gives a row a number behind the floor and behind the rows that its transaction sees. A sequence is no table: after a
-- logical switch-over the new server's begins anew, before rows that were copied.
CREATE FUNCTION public.txmq_outbox_number() RETURNS trigger LANGUAGE plpgsql VOLATILE
SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    bound bigint := (SELECT seq FROM public.txmq_outbox_floor WHERE log_id = NEW.log_id ORDER BY seq DESC LIMIT 1);
    highest bigint := GREATEST(bound - 1, (SELECT seq FROM public.txmq_outbox
        WHERE log_id = NEW.log_id AND seq >= COALESCE(bound, 0) ORDER BY seq DESC LIMIT 1));
BEGIN
    IF NEW.seq <= highest THEN
        IF (SELECT last_value < highest FROM public.txmq_outbox_seq_seq) THEN
            -- "txmq": two that mend the sequence take turns
            PERFORM pg_catalog.pg_advisory_xact_lock(1954049393, 1);
            PERFORM pg_catalog.setval('public.txmq_outbox_seq_seq', highest) FROM public.txmq_outbox_seq_seq
            WHERE last_value < highest;
        END IF;
        NEW.seq := pg_catalog.nextval('public.txmq_outbox_seq_seq');
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER txmq_outbox_number BEFORE INSERT ON public.txmq_outbox
    FOR EACH ROW EXECUTE FUNCTION public.txmq_outbox_number();


-- Messages by SQL.

-- Sends a message if the transaction commits, by way of the outbox, and returns the token of its bundle. For triggers
-- and psql. It runs with the caller's rights. What no broker would publish is refused, by the bytes of UTF-8. Where several brokers work on the database, log_id names one.
-- A crash may not take back a row that a broker has seen: the commit is made synchronous.
CREATE FUNCTION public.txmq_send(topic text, key text, body bytea, headers jsonb DEFAULT NULL, log_id uuid DEFAULT NULL)
RETURNS uuid LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    logs pg_catalog.uuid[] := ARRAY(SELECT broker.log_id FROM public.txmq_broker broker
        WHERE broker.forgotten_at IS NULL AND broker.log_id = COALESCE($5, broker.log_id));
    born timestamp with time zone := pg_catalog.clock_timestamp();
    token pg_catalog.uuid := OVERLAY(OVERLAY(
        pg_catalog.replace(pg_catalog.gen_random_uuid()::pg_catalog.text, '-', '')
        PLACING pg_catalog.lpad(pg_catalog.to_hex((EXTRACT(epoch FROM born) * 1000)::bigint), 12, '0') FROM 1)
        PLACING '7' FROM 13)::pg_catalog.uuid;
    utf8_key pg_catalog.bytea := pg_catalog.convert_to(NULLIF($2, ''), 'UTF8');
BEGIN
    IF $1 IS NULL OR $1 !~ '^[A-Za-z0-9_-][A-Za-z0-9._-]{0,126}$' OR $1 ~ '^_txmq[.]' THEN
        RAISE EXCEPTION 'txmq.send: invalid topic name %', pg_catalog.quote_nullable(pg_catalog.left($1, 127))
            USING ERRCODE = '22023',
            HINT = 'use 1 to 127 characters of A-Z a-z 0-9 . _ -, not beginning with a dot or _txmq.';
    END IF;
    IF pg_catalog.octet_length(utf8_key) > 1024 THEN
        RAISE EXCEPTION 'txmq.send: a key of % bytes exceeds the limit of 1024', pg_catalog.octet_length(utf8_key)
            USING ERRCODE = '22023';
    END IF;
    IF $3 IS NULL OR pg_catalog.octet_length($3) > 4194304 THEN
        RAISE EXCEPTION 'txmq.send: a body of % bytes is not accepted',
            COALESCE(pg_catalog.octet_length($3)::pg_catalog.text, 'NULL')
            USING ERRCODE = '22023', HINT = 'give up to 4194304 bytes';
    END IF;
    IF pg_catalog.jsonb_typeof($4) <> 'object' OR pg_catalog.octet_length(pg_catalog.convert_to($4::pg_catalog.text, 'UTF8')) > 32768
        OR (SELECT pg_catalog.count(*) > 64 OR pg_catalog.bool_or(pg_catalog.jsonb_typeof(header.value) <> 'string')
            FROM pg_catalog.jsonb_each(CASE pg_catalog.jsonb_typeof($4) WHEN 'object' THEN $4 END) header) THEN
        RAISE EXCEPTION 'txmq.send: invalid headers' USING ERRCODE = '22023',
            HINT = 'give an object of up to 64 strings, up to 32768 bytes in all';
    END IF;
    IF pg_catalog.cardinality(logs) <> 1 THEN
        RAISE EXCEPTION 'txmq.send: % brokers work on this database%', pg_catalog.cardinality(logs),
            CASE WHEN $5 IS NULL THEN '' ELSE pg_catalog.format(' for log %s', $5) END
            USING ERRCODE = '55000', HINT = CASE WHEN pg_catalog.cardinality(logs) > 1
                THEN 'name the log: txmq.send(topic, key, body, headers, log_id); see txmq schema brokers DSN'
                ELSE 'name this database under [[resolver]] in the broker''s settings' END;
    END IF;
    IF pg_catalog.current_setting('synchronous_commit') IN ('off', 'local', 'remote_write') THEN
        PERFORM pg_catalog.set_config('synchronous_commit', 'on', true);
    END IF;
    INSERT INTO public.txmq_token (tok, log_id) VALUES (token, logs[1]);
    INSERT INTO public.txmq_outbox (log_id, tok, service, messages, keys, content)
    VALUES (logs[1], token, 'sql', 1,
        CASE WHEN utf8_key IS NULL THEN '{}' ELSE ARRAY[('x' || pg_catalog.encode(pg_catalog.substr(
            pg_catalog.sha256(pg_catalog.convert_to($1, 'UTF8') || '\x00' || utf8_key), 1, 8), 'hex'))::pg_catalog.bit(64)::bigint]
        END,
        pg_catalog.convert_to(pg_catalog.jsonb_build_object(
        'topic', $1, 'key', NULLIF($2, ''), 'headers', COALESCE($4, '{}'), 'body', pg_catalog.encode($3, 'base64'),
        'born_at', (EXTRACT(epoch FROM born) * 1000000)::bigint)::pg_catalog.text, 'UTF8'));
    RETURN token;
END $$;

-- The same as txmq.send, with a body of bytes or of text, where the installing role may make a schema.
DO $$ BEGIN
    IF has_database_privilege(current_database(), 'CREATE') THEN
        CREATE SCHEMA IF NOT EXISTS txmq;
        GRANT USAGE ON SCHEMA txmq TO PUBLIC;
        CREATE FUNCTION txmq.send(
            topic text, key text, body bytea, headers jsonb DEFAULT NULL, log_id uuid DEFAULT NULL)
        RETURNS uuid LANGUAGE sql VOLATILE AS 'SELECT public.txmq_send($1, $2, $3, $4, $5)';
        CREATE FUNCTION txmq.send(
            topic text, key text, body text, headers jsonb DEFAULT NULL, log_id uuid DEFAULT NULL)
        RETURNS uuid LANGUAGE sql VOLATILE
        AS 'SELECT public.txmq_send($1, $2, pg_catalog.convert_to($3, ''UTF8''), $4, $5)';
        REVOKE EXECUTE ON FUNCTION txmq.send(text, text, bytea, jsonb, uuid), txmq.send(text, text, text, jsonb, uuid)
        FROM PUBLIC;
    END IF;
END $$;


-- The inbox. It knows a message by its log and its topic's id, because the names of topics and brokers come back with
-- other messages.

-- Messages whose effect is committed, one by one and then folded into ranges. The offset is that of the origin.
CREATE TABLE public.txmq_inbox_recent (
    grp text,
    log_id uuid,
    topic_id bigint,
    partition integer,
    epoch bigint,
    "offset" bigint,
    PRIMARY KEY (grp, log_id, topic_id, partition, epoch, "offset")
);

-- Refuses a COMMIT that txmq has not sent: a handler's, by which its message would count as applied in the middle.
-- The client sets txmq.claims with BEGIN, and releases its savepoint in the query string of its own COMMIT. Rows from
-- elsewhere, as those of a restored dump, are let through, and so is a handler that has its constraints checked before:
-- by SQL that does not commit in the same string, or by a function, of which the context has more lines.
-- To say it by another setting would take 5 microseconds more of the transaction's 130.
CREATE FUNCTION public.txmq_claim_guard() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    context pg_catalog.text;
BEGIN
    IF pg_catalog.strpos(pg_catalog.current_query(), 'RELEASE SAVEPOINT txmq_message') OPERATOR(pg_catalog.=) 0
        AND pg_catalog.current_setting('txmq.claims', true) OPERATOR(pg_catalog.=) 'open'
        AND (pg_catalog.current_query() OPERATOR(pg_catalog.!~*) 'set[[:space:]]+constraints'
            OR pg_catalog.current_query() OPERATOR(pg_catalog.~*) ';[[:space:]]*(commit|end|prepare)') THEN
        GET DIAGNOSTICS context := PG_CONTEXT;
        IF pg_catalog.strpos(context, E'\n') OPERATOR(pg_catalog.=) 0 THEN
            RAISE EXCEPTION 'txmq: the transaction of a message is committed when its handler has returned'
                USING ERRCODE := '2D000',
                HINT := 'an error of the handler rolls it back; a savepoint does for a part, and a connection of its'
                    ' own for other work';
        END IF;
    END IF;
    RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER txmq_claim_guard AFTER INSERT ON public.txmq_inbox_recent
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION public.txmq_claim_guard();

-- run: that of the broker that the newest of the effects are of. A member notes it before it applies messages of it.
CREATE TABLE public.txmq_inbox (
    grp text,
    log_id uuid,
    topic_id bigint,
    partition integer,
    epoch bigint,
    applied int8multirange NOT NULL,
    run uuid,
    PRIMARY KEY (grp, log_id, topic_id, partition, epoch)
);

-- Gives those of the offsets ($7, ascending) that nobody has applied, now claimed by this transaction; in order, so
-- that batches queue up instead of blocking one another. $1 to $5 are the position, $6 is its lock.
-- It is a function so that each session keeps the plans, behind a pooler too: planned anew for each message they cost
-- more than the rest of the transaction. Each statement of a volatile plpgsql function has a snapshot of its own: the
-- INSERT's is taken when the lock is held.
-- Under REPEATABLE READ they all see the transaction's snapshot. What was applied after it raises 40001, since the
-- folder leaves rows alone that somebody may not see yet. What was folded after it is found by a look at the row as it
-- was; by a subquery with one value, because for NOT EXISTS all rows of the position would be read and hashed.
-- One offset has a statement of its own: unnest of an array as short is planned anew each time.
CREATE FUNCTION public.txmq_claim(text, uuid, bigint, integer, bigint, bigint, bigint[]) RETURNS SETOF bigint
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    PERFORM pg_catalog.pg_advisory_xact_lock_shared($6);
    IF pg_catalog.current_setting('transaction_isolation') OPERATOR(pg_catalog.<>) 'read committed' THEN
        $7 := ARRAY(
            SELECT o FROM pg_catalog.unnest($7) o
            WHERE (
                SELECT true FROM public.txmq_inbox_recent
                WHERE (grp, log_id, topic_id, partition, epoch, "offset") OPERATOR(pg_catalog.=) ($1, $2, $3, $4, $5, o)
            ) IS NULL);
    END IF;
    IF pg_catalog.cardinality($7) OPERATOR(pg_catalog.=) 1 THEN
        INSERT INTO public.txmq_inbox_recent (grp, log_id, topic_id, partition, epoch, "offset")
        SELECT $1, $2, $3, $4, $5, $7[1]
        WHERE (
            SELECT applied OPERATOR(pg_catalog.@>) $7[1] FROM public.txmq_inbox
            WHERE (grp, log_id, topic_id, partition, epoch) OPERATOR(pg_catalog.=) ($1, $2, $3, $4, $5)) IS NOT TRUE
        ON CONFLICT DO NOTHING;
        IF FOUND THEN
            RETURN NEXT $7[1];
        END IF;
        RETURN;
    END IF;
    RETURN QUERY
    INSERT INTO public.txmq_inbox_recent (grp, log_id, topic_id, partition, epoch, "offset")
    SELECT $1, $2, $3, $4, $5, o FROM pg_catalog.unnest($7) o
    WHERE ((
        SELECT applied OPERATOR(pg_catalog.*)
            pg_catalog.int8multirange(pg_catalog.int8range($7[1], $7[pg_catalog.cardinality($7)], '[]'))
        FROM public.txmq_inbox
        WHERE (grp, log_id, topic_id, partition, epoch) OPERATOR(pg_catalog.=) ($1, $2, $3, $4, $5)
    ) OPERATOR(pg_catalog.@>) o) IS NOT TRUE
    ON CONFLICT DO NOTHING RETURNING "offset";
END $$;

REVOKE EXECUTE ON FUNCTION public.txmq_system_id, public.txmq_token_insert, public.txmq_timeline_history,
    public.txmq_outbox_stamp, public.txmq_outbox_waits, public.txmq_outbox_settle, public.txmq_outbox_number,
    public.txmq_send, public.txmq_claim, public.txmq_claim_guard
FROM PUBLIC;
