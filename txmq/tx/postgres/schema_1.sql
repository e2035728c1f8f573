-- Version 1. The schema is spelled out everywhere: whoever finds another txmq_token on its search path would take a
-- transaction that committed for one that never did.

CREATE TABLE public.txmq_schema (
    one bool PRIMARY KEY DEFAULT true CHECK (one),
    version int NOT NULL,
    installed_at timestamptz NOT NULL DEFAULT now()
);

-- One row per transaction and participating broker: the proof that the transaction committed.
-- state: C committed, D committed and decided so by a resolver, R fenced: decided as rolled back, the producer's own row
-- can never come. A UUIDv7 sorts by its time, so that a range is a span of time and everything about a token meets in
-- one partition.
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
    yesterday_ms int8 := (floor(extract(epoch FROM now()) / 86400)::int8 - 1) * 86400000;
BEGIN
    EXECUTE format(
        'CREATE TABLE public.txmq_token_closed PARTITION OF public.txmq_token (CONSTRAINT txmq_token_too_old CHECK (false))'
        ' FOR VALUES FROM (MINVALUE) TO (%L)', (lpad(to_hex(yesterday_ms), 12, '0') || repeat('0', 20))::uuid);
END $$;

-- Messages whose effect is committed, one by one and then folded into ranges. The offset is that of the origin.
CREATE TABLE public.txmq_inbox_recent (
    grp text,
    topic text,
    partition int,
    epoch int8,
    "offset" int8,
    PRIMARY KEY (grp, topic, partition, epoch, "offset")
);

CREATE TABLE public.txmq_inbox (
    grp text,
    topic text,
    partition int,
    epoch int8,
    applied int8multirange NOT NULL,
    PRIMARY KEY (grp, topic, partition, epoch)
);
