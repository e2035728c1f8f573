"""The services of examples/services, each a process as its users start it.

Orders go through all five while one is killed, another is stopped, the API that they
call is in trouble, and the broker is away and comes back. At the end rows, effects and
messages are equal.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from signal import SIGKILL, SIGTERM
from threading import Event, Thread
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import psycopg2
import pytest

import txmq
from tests.cli.support import run
from tests.client.real import ROOT
from tests.tx.postgres.support import rows
from txmq.testing.own_broker import KILLED, OwnBroker
from txmq.testing.ports import free_port
from txmq.testing.postgres_server import postgres_url
from txmq.testing.processes import ENVIRONMENT, Running
from txmq.testing.wait import PATIENCE_S, wait_until

SETTINGS = """
[consumers]
lost_connection_grace_s = 0.1
[checks]
first_s = 0.2
then_s = 0.2
longest_s = 0.5
[[resolver]]
name = "shop"
dsn = "{dsn}"
"""
AWAY, LATER, UNREADABLE = 503, 429, 422
WAITS = "SELECT FROM pg_locks WHERE NOT granted AND relation = 'charges'::regclass"


class Carrier(ThreadingHTTPServer):
    """The API of a carrier, which books each order once.

    The first requests for some orders are answered as `trouble` says, those of `held`
    when it is set. `asked` counts all of them.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), CarrierRequest)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.trouble = dict[str, int]()
        self.held = dict[str, Event]()
        self.asked = Counter[str]()
        self.booked = dict[str, str]()  # addresses, by order

    def book(self, order: str, address: str) -> int:
        """Return the status of the answer."""
        self.asked[order] += 1
        if order in self.held:
            assert self.held[order].wait(PATIENCE_S)
        if status := self.trouble.pop(order, 0):
            return status
        if address == "nowhere":
            return UNREADABLE
        self.booked[order] = address
        return 200


class CarrierRequest(BaseHTTPRequestHandler):
    """One request to the API."""

    server: Carrier

    def do_POST(self) -> None:  # as the base class has it
        parcel = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status = self.server.book(parcel["order"], parcel["address"])
        answer = json.dumps({"order": parcel["order"], "parcel": f"P{parcel['order']}"}).encode()
        self.send_response(status)
        if status == LATER:
            self.send_header("Retry-After", "1")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_arguments: object) -> None:
        """Do not write to the tests' output."""


@dataclass
class Shop:
    """Services, each a process, with their broker, their database and the API."""

    directory: Path
    dsn: str
    broker: OwnBroker
    carrier: Carrier
    web: str = field(default_factory=lambda: f"127.0.0.1:{free_port()}")
    services: dict[str, Running] = field(default_factory=dict)

    def start(self, name: str, *command: str) -> Running:
        """Start a service, by default as its docstring says."""
        environment = {
            **ENVIRONMENT,
            "PYTHONPATH": str(ROOT),
            "TXMQ_BROKER": self.broker.url,
            "DSN": self.dsn,
            "CARRIER": self.carrier.url,
        }
        python = (sys.executable, "-m", *(command or (f"examples.services.{name}",)))
        service = Running(self.directory / name, command=python, environment=environment)
        self.services[name] = service
        return service

    def start_web(self) -> None:
        host, _, port = self.web.partition(":")
        self.start("web", "uvicorn", "examples.services.web:app", "--host", host, "--port", port)

    def ask_web(self, order: dict[str, Any]) -> tuple[int, str]:
        """Place an order; return status and Retry-After, or 0 where nobody answers."""
        request = Request(f"http://{self.web}/orders", json.dumps(order).encode())
        request.add_header("Content-Type", "application/json")
        try:
            with urlopen(request, timeout=PATIENCE_S) as answer:
                return answer.status, ""
        except HTTPError as refused:
            with refused:
                return refused.code, refused.headers.get("Retry-After", "")
        except URLError:
            return 0, ""

    def sell(self, sales: list[dict[str, Any]]) -> None:
        """Sell at the till."""
        file = self.directory / "sales"
        file.write_text("".join(f"{json.dumps(sale)}\n" for sale in sales))
        assert self.start("till", "examples.services.till", str(file)).status(PATIENCE_S) == 0

    def place(self, *numbers: int, **fields: object) -> None:
        """Place orders, each as often as it takes."""
        for number in numbers:
            order = order_of(f"w-{number}", number, **fields)
            wait_until(lambda order=order: self.ask_web(order)[0] == 201, what=f"{order}")  # type: ignore[misc]  # one of each turn

    def column(self, name: str, table: str, order_by: str = "id") -> list[str]:
        found = rows(self.dsn, f"SELECT {name} FROM {table} ORDER BY {order_by}")
        return [str(value) for (value,) in found]

    def wait_for(self, table: str, number: int) -> None:
        wait_until(
            lambda: len(self.column("id", table)) >= number, what=f"{number} rows of {table}"
        )

    def shipped(self) -> list[str]:
        """Return the orders that others have heard are shipped."""
        with txmq.connect(self.broker.url, service="test", timeout=PATIENCE_S) as client:
            return [json.loads(found.body)["order"] for found in client.find("shipped")]

    def told(self, *words: str, status: int = 0) -> Any:
        """Return what a command of `txmq` says."""
        result = run(*words, "--json", "--broker", self.broker.url)
        assert result.exit_code == status, result.stdout + result.stderr
        return json.loads(result.stdout or result.stderr)

    def is_done(self) -> bool:
        """Return whether each group has processed everything."""
        groups = self.told("group", "list")["groups"]
        return [one["unprocessed"] for one in groups] == [0, 0, 0]

    def wait_for_resolver(self) -> None:
        """Wait until the broker is registered in the database, for who starts while it
        is away.
        """
        wait_until(
            lambda: rows(self.dsn, "SELECT FROM txmq_broker"), what="the broker is registered"
        )


def order_of(name: str, number: int, **fields: object) -> dict[str, Any]:
    """Return an order of one of three customers."""
    order = {"id": name, "customer": f"c-{number % 3}", "cents": 100 + number}
    return order | {"address": f"{number} High Street"} | fields


@pytest.fixture
def shop(tmp_path: Path, database: str) -> Iterator[Shop]:
    tables = resources.files("examples.services").joinpath("schema.sql").read_text("utf-8")
    rows(database, tables)
    broker = OwnBroker(tmp_path / "broker", SETTINGS.format(dsn=database))
    with Carrier() as carrier, broker:
        Thread(target=carrier.serve_forever, daemon=True).start()
        shop = Shop(tmp_path, postgres_url(database), broker, carrier)
        shop.wait_for_resolver()
        try:
            yield shop
        finally:
            for service in shop.services.values():
                service.process.kill()
                service.process.wait()
            for gate in carrier.held.values():
                gate.set()
            carrier.shutdown()


@contextmanager
def killed_while_it_charges(shop: Shop) -> Iterator[None]:
    """Kill the process that charges in the middle of what the block places, and start
    it again.
    """
    with closing(psycopg2.connect(shop.dsn)) as connection, connection.cursor() as cursor:
        cursor.execute("LOCK TABLE charges IN EXCLUSIVE MODE")
        yield
        wait_until(lambda: rows(shop.dsn, WAITS), what="a charge that waits")
        assert shop.services["payment"].terminate(SIGKILL) == KILLED
    shop.start("payment")


def stop_while_it_books(shop: Shop, number: int) -> None:
    """Stop the process that waits for the API, which ends when it has the answer; start
    it again.
    """
    name, gate = f"w-{number}", Event()
    shop.carrier.held[name] = gate
    shop.place(number)
    wait_until(lambda: shop.carrier.asked[name], what="a request that waits for its answer")
    shop.services["carrier"].process.send_signal(SIGTERM)
    gate.set()
    assert shop.services["carrier"].status(PATIENCE_S) == 0
    assert name in shop.shipped()
    shop.start("carrier")


def mend_the_address(shop: Shop, number: int) -> None:
    """Edit and replay the letter of an order whose address the API refuses."""
    with txmq.connect(shop.broker.url, service="operator", timeout=PATIENCE_S) as client:
        wait_until(lambda: [*client.letters("carrier")], what="the letter of the bad order")
        [letter] = client.letters("carrier", bodies=True)
    assert letter.error_type == "__main__.AddressRefused"
    assert letter.body is not None
    mended = letter.body.decode().replace("nowhere", "1 Low Road")
    place = f"{letter.topic}/{letter.partition}/{letter.offset}"
    edit = ("dlq", "edit", "carrier", place, "--reason", "asked the customer", "--body")
    assert "no JSON" in shop.told(*edit, mended[:-1], status=1)["message"]
    shop.told(*edit, mended)
    shop.told("dlq", "replay", "carrier", place, "--reason", "mended")
    wait_until(lambda: f"w-{number}" in shop.carrier.booked, what="the mended order is booked")


def test_orders_go_through_all_five_whatever_dies_is_away_or_wrong(shop: Shop) -> None:
    shop.broker.kill()
    sales = [order_of(f"t-{number}", number) for number in range(6)]
    shop.sell(sales[:4])
    assert shop.column("id", "orders") == [sale["id"] for sale in sales[:4]]
    shop.start_web()
    wait_until(lambda: shop.ask_web(order_of("w-0", 0))[0], what="the web service answers")
    assert shop.ask_web(order_of("w-0", 0)) == (AWAY, "2")
    shop.broker.start()
    for name in ("payment", "carrier", "notices"):
        shop.start(name)

    shop.carrier.trouble |= {"w-1": LATER, "w-2": AWAY, "t-3": AWAY}
    shop.place(*range(4))
    with killed_while_it_charges(shop):
        shop.place(4, 5, 6)
    shop.place(7, address="nowhere")
    stop_while_it_books(shop, 8)
    shop.broker.restart()
    shop.place(9, 10, 11)
    shop.sell(sales)
    mend_the_address(shop, 7)

    placed = sorted([f"w-{number}" for number in range(12)] + [sale["id"] for sale in sales])
    shop.wait_for("notices", len(placed))
    wait_until(shop.is_done, what="no message is unprocessed")
    assert shop.column("id", "orders") == placed
    assert shop.column("order_id", "charges", "order_id") == placed
    assert sorted(shop.carrier.booked) == placed
    assert sorted(shop.shipped()) == placed
    assert shop.column("order_id", "notices", "order_id") == placed
    assert charges_in_order(shop)
    followed = shop.told("trace", "--header", "correlation=w-7")["messages"]
    assert [one["topic"] for one in followed] == ["orders", "paid", "shipped"]
    for name in ("payment", "carrier", "notices"):
        assert shop.services[name].terminate() == 0, name


def charges_in_order(shop: Shop) -> bool:
    """Return whether the orders of each customer were charged in their order."""
    charged = rows(
        shop.dsn, "SELECT customer, cents FROM charges WHERE order_id ~ '^w' ORDER BY id"
    )
    by_customer: dict[object, list[Any]] = {}
    for customer, cents in charged:
        by_customer.setdefault(customer, []).append(cents)
    return all(cents == sorted(cents) for cents in by_customer.values())


def test_what_stands_in_for_the_api_books_once_and_refuses_what_has_no_address() -> None:
    from aiohttp.test_utils import TestClient, TestServer  # of deep tests only

    from examples.services.parcels import application  # likewise

    async def booked(*addresses: str) -> list[tuple[int, str]]:
        found = []
        async with TestClient(TestServer(application())) as api:
            for address in addresses:
                parcel = {"order": "o-1", "address": address}
                async with api.post("/parcels", json=parcel) as answer:
                    found.append((answer.status, await answer.text()))
        return found

    first, again, refused = asyncio.run(booked("1 Low Road", "1 Low Road", ""))
    assert first == again == (200, '{"order": "o-1", "parcel": "P-1"}')
    assert refused == (UNREADABLE, "no address")


def test_a_killed_payment_charges_once_and_ends_in_order(shop: Shop) -> None:
    """The short story: a service that needs no framework."""
    shop.start("payment")
    with txmq.connect(shop.broker.url, service="web", timeout=PATIENCE_S) as client:
        client.call("topic.create", name="paid", partitions=1)
        with killed_while_it_charges(shop):
            for number in range(9):
                order = order_of(f"w-{number}", number)
                client.send("orders", json.dumps(order).encode(), key=order["customer"])
        shop.wait_for("charges", 9)
        assert shop.services["payment"].terminate() == 0
        wait_until(lambda: len([*client.find("paid")]) >= 9, what="the broker fetches the outbox")
        paid = [json.loads(found.body)["id"] for found in client.find("paid")]
    assert shop.column("order_id", "charges", "order_id") == sorted(paid)
    assert len(paid) == 9
    assert charges_in_order(shop)
