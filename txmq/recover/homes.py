"""The brokers that recovery works with, and what their logs say of a transaction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from txmq.client.blocking.alarm_reports import Alarm, report
from txmq.client.blocking.transaction.bundles import EPOCH
from txmq.errors import LogChanged, RequestRejected, TxmqError, UnknownTransaction
from txmq.model.message import UNKNOWN, Decision
from txmq.tx.orphans import Word, word_of
from txmq.wire.headers import Decide, Opcode, pack_decide

if TYPE_CHECKING:
    from txmq.client.blocking.client import Client

BY: Final = "xa-recovery"  # in whose name brokers are asked and told
PAGE: Final = 1_000  # transactions in one reply
MOST: Final = 100 * PAGE  # looked at in one pass, the oldest first


class Home:
    """One broker. What it is asked does no harm twice, so that lost answers are asked
    for again.
    """

    def __init__(self, url: str, connect: Callable[[str], Client]) -> None:
        self.url = url
        self.log_id: UUID | None = None  # None: it has never been met
        self.trouble = ""  # why it cannot be asked now
        self._connect = connect
        self._client: Client | None = None

    def meet(self) -> None:
        """Finds out, before each pass, whether the broker answers and which log it
        has.
        """
        try:
            try:
                shown = self.call("broker.show")
            except (
                LogChanged
            ):  # its data directory was replaced: what the old log decided, this one cannot know
                self.close()
                shown = self.call("broker.show")
            self.log_id, self.trouble = UUID(shown["log_id"]), ""
        except TxmqError as error:
            self.trouble = str(error)

    def word(self, token: UUID, *, decide: bool) -> Word:
        """How it decided a transaction that it is the home of; `decide` as in the call
        `xa.outcome`.
        """
        if self.trouble:
            return Word.SILENT
        try:
            return word_of(
                self.call(
                    "xa.outcome", token=token.hex, log_id=str(self.log_id), decide=decide, by=BY
                )["state"]
            )
        except UnknownTransaction:
            return Word.FORGOTTEN
        except LogChanged:
            return Word.UNKNOWN_LOG
        except RequestRejected:
            return Word.REFUSED
        except TxmqError as error:
            self.trouble = str(error)
            return Word.SILENT

    def groups(self) -> Iterator[dict[str, Any]]:
        """What `xa.list` lists, page by page. Raises TxmqError."""
        return islice(chain.from_iterable(self._pages("xa.list", None)), MOST)

    def committed(self, since: UUID, pages: int | None = None) -> Iterator[list[dict[str, Any]]]:
        """What it has committed as the home of it, of tokens after `since`; of so many
        pages. Raises TxmqError.
        """
        return islice(self._pages("xa.decided", since.hex), pages)

    def _pages(self, call: str, after: str | None) -> Iterator[list[dict[str, Any]]]:
        while True:
            page = self.call(call, after=after, limit=PAGE)
            yield page["transactions"]
            after = page["next"]
            if after is None:
                return

    def decide(self, token: UUID, outcome: Decision) -> None:
        """Tells the broker what another one, the home of the transaction, has decided.
        Raises TxmqError.
        """
        payload = pack_decide(Decide(outcome, token.bytes, EPOCH, BY))
        self._client_now().core.request(Opcode.DECIDE, payload, repeat=True)

    def tell(self, source: str, alarms: Iterable[Alarm], for_s: float) -> None:
        """Has the broker list these alarms; one that fails meanwhile is told again
        after the next pass.
        """
        try:
            report(self.call, source, alarms, for_s)
        except TxmqError as error:
            self.trouble = str(error)

    def call(self, name: str, /, **args: object) -> dict[str, Any]:
        """What a control call returns. Raises TxmqError."""
        return self._client_now().core.call(name, args, repeat=True)

    def close(self) -> None:
        """Closes the connections; the next question opens one again."""
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _client_now(self) -> Client:
        self._client = self._client or self._connect(self.url)
        return self._client


class Homes:
    """All brokers that are configured. What one has decided is asked for once in a
    pass.
    """

    def __init__(self, urls: Iterable[str], connect: Callable[[str], Client]) -> None:
        self.all = [Home(url, connect) for url in dict.fromkeys(urls)]
        self._decided: dict[tuple[str, UUID], Word] = {}

    def meet(self) -> None:
        """Before each pass."""
        self._decided.clear()
        for home in self.all:
            home.meet()

    def word(self, log: str, token: UUID, *, decide: bool = False) -> Word:
        """How the broker decided whose log id begins with the hex digits `log`."""
        known = self._decided.get((log, token))
        if known is not None:
            return known
        home = self.find(log)
        if home is None:  # one that was never met since the start may be it
            return Word.SILENT if any(one.log_id is None for one in self.all) else Word.UNKNOWN_LOG
        word = home.word(token, decide=decide)
        if word.decision is not UNKNOWN:
            self._decided[log, token] = word
        return word

    def find(self, log: str) -> Home | None:
        """The broker whose log id begins so; none where several logs do, for nobody
        knows which is meant.
        """
        met = [one for one in self.all if one.log_id is not None and one.log_id.hex.startswith(log)]
        return met[0] if len({one.log_id for one in met}) == 1 else None

    def note(self, log: str, token: UUID, **entry: str) -> bool:
        """Writes a heuristic outcome into the journal of the home broker
        (`xa.heuristic`). Raises TxmqError.

        True where somebody has dealt with it before.
        """
        home = self.find(log)
        if home is None:
            raise UnknownTransaction(
                f"no broker that is configured has log {log}", hint="name it: [[xa.broker]]"
            )
        return bool(home.call("xa.heuristic", token=token.hex, **entry)["dealt"])

    def close(self) -> None:
        for home in self.all:
            with suppress(TxmqError):
                home.close()
