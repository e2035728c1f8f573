"""The logs that a read is about: that of its URL, and those that are listed with it.

Brokers tell of the list in their welcomes, and when it changes, as they tell clients of
several brokers. So a stream reads a log that is added from its next batch on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Final, NamedTuple, TypeVar
from uuid import UUID

import pyarrow as pa

from txmq.client.protocol.address import Addresses, node_address, url_at
from txmq.client.protocol.sender.brokers import Brokers
from txmq.errors import (
    BrokerUnavailable,
    ConfigError,
    ConnectionLost,
    LogChanged,
    RequestTimeout,
    UnknownGroup,
)
from txmq_spark.source.broker_link import BrokerLink
from txmq_spark.source.offset_ranges import Survey
from txmq_spark.source.options import ReadOptions

T = TypeVar("T")
LOG: Final = pa.field("log", pa.string())  # the column
Read = Callable[[Sequence[str]], Iterator[pa.RecordBatch]]  # of columns
Look = Callable[[BrokerLink, bool], Survey]  # some of what is asked for may be missing


class LogTask(NamedTuple):
    """A task in one log, which is at this URL."""

    url: str
    log_id: str
    work: Any  # a TaskRange or a LetterRange

    def of(self, options: ReadOptions) -> ReadOptions:
        """Return the options of a read as they are for this task."""
        return options._replace(url=self.url, log=self.log_id)


class LogPlace(NamedTuple):
    """A log, and where it is: HOST:PORT, or several with commas. `listed` False = it is
    on no list any more.
    """

    link: BrokerLink
    at: str = ""
    listed: bool = True


class Surveyed(NamedTuple):
    """What a log has to read."""

    place: LogPlace
    survey: Survey


class Logs(AbstractContextManager["Logs"]):
    """Connections to the logs of a read, for the driver."""

    def __init__(self, options: ReadOptions) -> None:
        self.options = options
        self._brokers = Brokers([BrokerLink(options.url)], self._link_at, lambda _broker: None)
        self._unlisted: list[BrokerLink] = []

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        for link in (*self._brokers.cores, *self._unlisted):
            link.close()

    def _link_at(self, addresses: Addresses) -> BrokerLink:
        return BrokerLink(url_at(self.options.url, addresses))

    @property
    def are_several(self) -> bool:
        """True if there is a list of logs."""
        return self._brokers.version > 0

    def places(self, *, begins: bool = True) -> list[LogPlace]:
        """Return the logs that are listed; where a read `begins`, that of the URL, too,
        if it is on no list. All of them have answered.

        Raises BrokerUnavailable, LogChanged, ConfigError where there is no such log.
        """
        if self.options.log is not None:
            return [self._chosen(self.options.log)]
        first, version = self._brokers.cores[0], -1
        own = {first.meet(): LogPlace(first, listed=False)}
        while self._brokers.version != version:  # others may know a later list
            version, listed = self._brokers.version, self._brokers.listed
            found = own.copy()
            for one, link in listed:
                found[link.meet()] = LogPlace(link, one.addresses)
                if self._brokers.version != version:
                    break  # the rest may be gone
        if not self.are_several:
            return [LogPlace(first)]
        return [one for one in found.values() if one.listed or begins]

    def _chosen(self, log_id: str) -> LogPlace:
        """Return one log. The others need not be there."""
        self._brokers.cores[0].meet()
        for link in self._brokers.cores:
            if str(link.known_log_id) == log_id:
                return LogPlace(link)
        raise ConfigError("log", f"there is no log {log_id}", hint="the list: txmq cluster logs")

    def removed(self, log_id: str, at: str) -> LogPlace | None:
        """Return a log that was listed, at its last addresses; None = it cannot be
        found.
        """
        if self.options.log not in (None, log_id):
            return None
        known = {str(link.known_log_id): link for link in (*self._brokers.cores, *self._unlisted)}
        link = known.get(log_id) or self._link_to(log_id, at)
        return None if link is None else LogPlace(link, at, listed=False)

    def _link_to(self, log_id: str, at: str) -> BrokerLink | None:
        addresses = Addresses(filter(None, map(node_address, at.split(","))))
        if not addresses:
            return None
        link = self._link_at(addresses)
        link.expect_log(UUID(log_id))
        self._unlisted.append(link)
        return link


def url_of(url: str, log_id: str) -> str:
    """Return the URL of a log, which is that of this URL or listed with it; the same
    URL where it is neither.
    """
    with BrokerLink(url) as link:
        if link.log_id != log_id:
            for listed in link.log_list.logs:
                if str(listed.log_id) == log_id:
                    return url_at(url, link.addresses_of(listed))
    return url


def survey_all(places: Sequence[LogPlace], look: Look, names: Sequence[str] = ()) -> list[Surveyed]:
    """Return what each log has. Raises as `look` where none has one of the names."""
    missing = len(places) > 1 or not names
    found = [Surveyed(one, look(one.link, missing)) for one in places]
    if not {name for one in found for name in one.survey.topics}.issuperset(names):
        look(places[0].link, False)
    return found


def survey_removed(place: LogPlace, look: Look) -> list[Surveyed]:
    """Return what a log has that is listed no more, if it answers at once: its machine
    may be gone.
    """
    place.link.patient = False
    try:
        return [Surveyed(place, look(place.link, True))]
    except (BrokerUnavailable, ConnectionLost, RequestTimeout, LogChanged):
        return []
    finally:  # it may be listed again, or be the one of the URL
        place.link.patient = True


def ask_of_group(
    places: Sequence[LogPlace], ask: Callable[[BrokerLink], T]
) -> list[tuple[LogPlace, T]]:
    """Return what each log answers that has a group. Raises UnknownGroup where none has
    it.
    """
    found: list[tuple[LogPlace, T]] = []
    unknown: list[UnknownGroup] = []
    for place in places:
        try:
            found.append((place, ask(place.link)))
        except UnknownGroup as error:
            unknown.append(error)
    if not found:
        raise unknown[0]
    return found


def require_one_log(places: Sequence[LogPlace], given: Mapping[str, Any]) -> None:
    """Raise ConfigError for offsets of several logs: each has its own."""
    if given and len(places) > 1:
        raise ConfigError(
            "startingOffsets",
            f"{len(places)} logs are read, and each has offsets of its own",
            hint='option("startingTimestamp", ...), or option("log", ...) for one of them',
        )


def with_log(read: Read, names: Sequence[str], log_id: str) -> Iterator[pa.RecordBatch]:
    """Yield the columns `names`, of which a reader of one log has all but `log`."""
    if LOG.name not in names:
        yield from read(names)
        return
    others = [name for name in names if name != LOG.name]
    for batch in read(others or ["offset"]):
        column = pa.repeat(pa.scalar(log_id), batch.num_rows)
        arrays = [column if name == LOG.name else batch.column(name) for name in names]
        yield pa.RecordBatch.from_arrays(arrays, names=list(names))
