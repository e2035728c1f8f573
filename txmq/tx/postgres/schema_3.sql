-- Version 3. The inbox's claim as a function, whose plans each session keeps, behind a pooler too: planned anew for each
-- message it cost more than the rest of the transaction.

-- Gives those of the offsets ($6, ascending) that nobody has applied, now claimed by this transaction; in order, so that
-- batches queue up instead of blocking one another. $1 to $4 are the position, $5 is its lock. Each statement of a
-- volatile plpgsql function has a snapshot of its own: the INSERT's is taken when the lock is held.
-- Under REPEATABLE READ they all see the transaction's snapshot. What was applied after it raises 40001, since the
-- folder leaves rows alone that somebody may not see yet. What was folded after it is found by a look at the row as it
-- was; by a subquery with one value, because for NOT EXISTS all rows of the position would be read and hashed.
-- One offset has a statement of its own: unnest of an array as short is planned anew each time.
CREATE FUNCTION public.txmq_claim(text, text, int, int8, int8, int8[]) RETURNS SETOF int8 LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    PERFORM pg_advisory_xact_lock_shared($5);
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        $6 := ARRAY(
            SELECT o FROM unnest($6) o
            WHERE (
                SELECT true FROM public.txmq_inbox_recent
                WHERE grp = $1 AND topic = $2 AND partition = $3 AND epoch = $4 AND "offset" = o) IS NULL);
    END IF;
    IF cardinality($6) = 1 THEN
        INSERT INTO public.txmq_inbox_recent (grp, topic, partition, epoch, "offset")
        SELECT $1, $2, $3, $4, $6[1]
        WHERE (
            SELECT applied @> $6[1] FROM public.txmq_inbox
            WHERE grp = $1 AND topic = $2 AND partition = $3 AND epoch = $4) IS NOT TRUE
        ON CONFLICT DO NOTHING;
        IF FOUND THEN
            RETURN NEXT $6[1];
        END IF;
        RETURN;
    END IF;
    RETURN QUERY
    INSERT INTO public.txmq_inbox_recent (grp, topic, partition, epoch, "offset")
    SELECT $1, $2, $3, $4, o FROM unnest($6) o
    WHERE ((
        SELECT applied * int8multirange(int8range($6[1], $6[cardinality($6)], '[]')) FROM public.txmq_inbox
        WHERE grp = $1 AND topic = $2 AND partition = $3 AND epoch = $4) @> o) IS NOT TRUE
    ON CONFLICT DO NOTHING RETURNING "offset";
END $$;
