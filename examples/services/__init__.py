"""Five services of a shop, each of another kind. An order goes through them.

    web.py      FastAPI, asyncpg            takes orders over HTTP        -> orders
    till.py     SQLAlchemy, psycopg 3       sells, also without a broker  -> orders
    payment.py  threads, psycopg2, inbox    orders   charges each once    -> paid
    carrier.py  asyncio, aiohttp            paid     books a parcel       -> shipped
    notices.py  Django                      shipped  writes to customers

Beside `txmq dev`, in the directory that has `examples`:

    pip install '.[broker,postgres,psycopg,asyncpg,sqlalchemy,django]'
    pip install fastapi uvicorn aiohttp
    export DSN=...           # what `txmq dev` prints behind "postgres"
    export TXMQ_BROKER=...   # and behind "broker"
    psql $DSN -f examples/services/schema.sql
    uvicorn examples.services.web:app &
    python -m examples.services.payment &

Each file's docstring has its command. They share no code, as services do not;
test_services.py has tests of them by txmq's plugin of pytest.
"""
