"""The brokers of recovery, and the outcomes that their logs hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from txmq.client.blocking.core import core_of
from txmq.client.protocol.address import place_of
from txmq.client.protocol.alarm_reports import AlarmReport, report_alarms
from txmq.client.protocol.transaction.parts import EPOCH
from txmq.errors import LogChanged, RequestRejected, TxmqError, UnknownTransaction
from txmq.model.message import UNKNOWN, Decision
from txmq.tx.orphans import KnownOutcome, known_outcome
from txmq.wire.data_requests import Decide, Opcode, pack_decide

if TYPE_CHECKING:
    from txmq.client.blocking.client import Client

RECOVERY_NAME: Final = "xa-recovery"  # the name of recovery in brokers' journals
PAGE_SIZE: Final = 1_000  # transactions in one reply
MAX_ROWS: Final = 100 * PAGE_SIZE  # of one pass, the oldest first


class HomeBroker:
    """One configured broker, the home of some transactions.

    All requests are idempotent, so they are repeated after lost answers.
    """

    def __init__(self, url: str, connect: Callable[[str], Client]) -> None:
        self.url, self._url = place_of(url), url
        self.log_id: UUID | None = None  # None = unknown yet
        self.trouble = ""  # the error of the last request, "" after a success
        self._connect = connect
        self._client: Client | None = None

    def identify(self) -> None:
        """Read the id of the broker's log before a pass; note an error in `trouble`."""
        try:
            try:
                shown = self.call("broker.show")
            except LogChanged:
                # The data directory was replaced. The new log knows no decision of the
                # old.
                self.close()
                shown = self.call("broker.show")
            self.log_id, self.trouble = UUID(shown["log_id"]), ""
        except TxmqError as error:
            self.trouble = str(error)

    def outcome(self, token: UUID, *, decide: bool) -> KnownOutcome:
        """Return the outcome of a transaction whose home this broker is.

        `decide` makes the broker decide it, as in the call `xa.outcome`.
        """
        if self.trouble:
            return KnownOutcome.SILENT
        try:
            args = {"token": token.hex, "log_id": str(self.log_id), "decide": decide}
            return known_outcome(self.call("xa.outcome", **args, by=RECOVERY_NAME)["state"])
        except UnknownTransaction:
            return KnownOutcome.FORGOTTEN
        except LogChanged:
            return KnownOutcome.UNKNOWN_LOG
        except RequestRejected:
            return KnownOutcome.REFUSED
        except TxmqError as error:
            self.trouble = str(error)
            return KnownOutcome.SILENT

    def reports(self) -> dict[tuple[int, int], int]:
        """Return how many reports of the broker each database holds, by system id and
        oid. Raises TxmqError.
        """
        return {
            (system_id, oid): number for system_id, oid, number in self.call("tx.oldest")["reports"]
        }

    def list_bundles(self) -> Iterator[dict[str, Any]]:
        """Yield the rows of `xa.list`. Raises TxmqError."""
        return islice(chain.from_iterable(self._pages("xa.list", None)), MAX_ROWS)

    def list_committed(
        self, since: UUID, pages: int | None = None
    ) -> Iterator[list[dict[str, Any]]]:
        """Yield pages of the transactions that this home has committed.

        Only tokens after `since`, and at most `pages` pages. Raises TxmqError.
        """
        return islice(self._pages("xa.decided", since.hex), pages)

    def _pages(self, call: str, after: str | None) -> Iterator[list[dict[str, Any]]]:
        while True:
            page = self.call(call, after=after, limit=PAGE_SIZE)
            yield page["transactions"]
            after = page["next"]
            if after is None:
                return

    def decide(self, token: UUID, outcome: Decision) -> None:
        """Decide a bundle here as the home broker has. Raises TxmqError."""
        payload = pack_decide(Decide(outcome, token.bytes, EPOCH, RECOVERY_NAME))
        core_of(self._open_client()).request(Opcode.DECIDE, payload, repeat=True)

    def report_alarms(self, source: str, alarms: Iterable[AlarmReport], for_s: float) -> None:
        """Report alarms to the broker; the next pass repeats what failed."""
        try:
            report_alarms(self.call, source, alarms, for_s)
        except TxmqError as error:
            self.trouble = str(error)

    def call(self, name: str, /, **args: object) -> dict[str, Any]:
        """Return the reply of a control call. Raises TxmqError."""
        return core_of(self._open_client()).call(name, args, repeat=True)

    def close(self) -> None:
        """Close the connections; the next request opens one again."""
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _open_client(self) -> Client:
        self._client = self._client or self._connect(self._url)
        return self._client


class HomeBrokers:
    """The configured brokers, and the outcomes that the present pass has read."""

    def __init__(self, urls: Iterable[str], connect: Callable[[str], Client]) -> None:
        self.all = [HomeBroker(url, connect) for url in dict.fromkeys(urls)]
        self._outcomes: dict[tuple[str, UUID], KnownOutcome] = {}

    def identify(self) -> None:
        """Identify all brokers before a pass."""
        self._outcomes.clear()
        for home in self.all:
            home.identify()

    def outcome(self, log: str, token: UUID, *, decide: bool = False) -> KnownOutcome:
        """Return the outcome at the home whose log id begins with `log`."""
        known = self._outcomes.get((log, token))
        if known is not None:
            return known
        home = self.find(log)
        if home is None:  # a broker that never answered may be the home
            return (
                KnownOutcome.SILENT
                if any(one.log_id is None for one in self.all)
                else KnownOutcome.UNKNOWN_LOG
            )
        outcome = home.outcome(token, decide=decide)
        if outcome.decision is not UNKNOWN:
            self._outcomes[log, token] = outcome
        return outcome

    def find(self, log: str) -> HomeBroker | None:
        """Return the broker whose log id begins with `log`; None if several logs do."""
        matching = [
            one for one in self.all if one.log_id is not None and one.log_id.hex.startswith(log)
        ]
        return matching[0] if len({one.log_id for one in matching}) == 1 else None

    def record_heuristic(self, log: str, token: UUID, **entry: str) -> bool:
        """Enter a heuristic outcome in the home broker's journal. Raises TxmqError.

        Returns whether an operator has dealt with it already.
        """
        home = self.find(log)
        if home is None:
            raise UnknownTransaction(
                f"No configured broker has log {log}",
                hint="name the broker under [[xa.broker]]",
            )
        return bool(home.call("xa.heuristic", token=token.hex, **entry)["dealt"])

    def close(self) -> None:
        for home in self.all:
            with suppress(TxmqError):
                home.close()
