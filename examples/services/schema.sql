CREATE TABLE orders (id text PRIMARY KEY, customer text NOT NULL, cents int NOT NULL, address text NOT NULL);
CREATE TABLE charges (id serial PRIMARY KEY, order_id text NOT NULL, customer text NOT NULL, cents int NOT NULL);
CREATE TABLE notices (id serial PRIMARY KEY, order_id text NOT NULL, parcel text NOT NULL);
