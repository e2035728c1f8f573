-- Version 4. Identity: of a topic and its log in the inbox, of the broker that works on this database, of a row of the
-- outbox.

-- The inbox.

SELECT;

-- The brokers.

SELECT;

-- The outbox.

SELECT;
