"""Five services of a shop, each of another kind. An order goes through them.

    web.py      FastAPI, asyncpg            takes orders over HTTP        -> orders
    till.py     SQLAlchemy, psycopg 3       sells, also without a broker  -> orders
    payment.py  threads, psycopg2, inbox    orders   charges each once    -> paid
    carrier.py  asyncio, aiohttp            paid     books a parcel       -> shipped
    notices.py  Django                      shipped  writes to customers

Beside a new `txmq dev`, which has no tables of README's, in the directory that has
`examples`:

    pip install '.[broker,postgres,psycopg,asyncpg,sqlalchemy,django]'
    pip install fastapi uvicorn aiohttp
    export DSN=...           # what `txmq dev` prints behind "postgres"
    export TXMQ_BROKER=...   # and behind "broker"
    export CARRIER=http://127.0.0.1:8080   # parcels.py, which stands in for the API
    psql $DSN -f examples/services/schema.sql
    uvicorn examples.services.web:app &
    for name in payment parcels carrier notices; do
        python -m examples.services.$name &
    done
    curl 127.0.0.1:8000/orders -H 'Content-Type: application/json' -d \
        '{"id": "o-1", "customer": "c-7", "cents": 900, "address": "12 High Street"}'
    txmq trace --header correlation=o-1

The order is in `orders`, `paid` and `shipped`. With an empty address it is a dead
letter of group `carrier`; with more than 100,000 cents, of group `payment`.
Each file's docstring has its command. They share no code, as services do not;
test_services.py has tests of them by txmq's plugin of pytest.
"""
