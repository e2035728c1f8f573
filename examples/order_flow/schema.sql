-- The tables of the shop; the tables of txmq are installed in the same database.
--
-- charges and shipments have no constraint against a second row for an order.
-- The inbox prevents such rows, and the audit checks that there are none.

CREATE TABLE customers (
    customer_id int8 PRIMARY KEY,
    opening_cents int8 NOT NULL,
    balance_cents int8 NOT NULL,
    version int8 NOT NULL DEFAULT 0,       -- number of orders of the account
    blocked bool NOT NULL DEFAULT false    -- payment refuses its orders
);

CREATE TABLE parts (
    part_id int8 PRIMARY KEY,
    customs_code text                      -- orders with a part without a code cannot be shipped
);

CREATE TABLE carriers (
    carrier text PRIMARY KEY,
    available bool NOT NULL DEFAULT true
);

CREATE TABLE orders (
    order_id int8 PRIMARY KEY,
    customer_id int8 NOT NULL REFERENCES customers,
    version int8 NOT NULL,
    total_cents int8 NOT NULL,
    ordered_on date NOT NULL,
    carrier text NOT NULL REFERENCES carriers,
    UNIQUE (customer_id, version)
);

CREATE TABLE order_lines (
    order_id int8 NOT NULL REFERENCES orders,
    line int4 NOT NULL,
    part_id int8 NOT NULL,
    quantity int4 NOT NULL,
    price_cents int8 NOT NULL,
    PRIMARY KEY (order_id, line)
);

CREATE TABLE charges (
    charge_id bigserial PRIMARY KEY,
    order_id int8 NOT NULL,
    customer_id int8 NOT NULL,
    cents int8 NOT NULL
);

CREATE TABLE shipments (
    shipment_id bigserial PRIMARY KEY,     -- in the order of shipping
    order_id int8 NOT NULL,
    customer_id int8 NOT NULL,
    version int8 NOT NULL,
    carrier text NOT NULL
);

CREATE TABLE alerts (
    id text PRIMARY KEY,                   -- of the watch over dead letters
    kind text NOT NULL,
    consumer_group text NOT NULL,
    dead_at timestamptz NOT NULL,
    alert jsonb NOT NULL,
    added_at timestamptz NOT NULL DEFAULT now(),
    job text,
    told_at timestamptz
);

CREATE TABLE sales (
    ordered_on date PRIMARY KEY,
    orders int8 NOT NULL,
    cents int8 NOT NULL
);
