-- Version 2. The brokers that this database decides for, and what waits for one of them that was away.

-- What each broker has reported of itself: rows of tokens go when no broker has an undecided group as old any more.
-- oldest_undecided is NULL where everything is decided. A broker that is forgotten holds nothing up; should it report
-- again, it is back.
CREATE TABLE public.txmq_broker (
    log_id uuid PRIMARY KEY,
    name text NOT NULL,
    oldest_undecided uuid,
    reported_at timestamptz NOT NULL,
    forgotten_at timestamptz,
    forgotten_reason text
);

-- Transactions whose messages their broker is yet to fetch, in the order of seq; content as docs/FORMATS.md has it.
CREATE TABLE public.txmq_outbox (
    log_id uuid,
    seq int8 GENERATED ALWAYS AS IDENTITY,
    tok uuid NOT NULL,
    service text NOT NULL,
    messages int NOT NULL,
    content bytea NOT NULL,
    at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (log_id, seq)
);
