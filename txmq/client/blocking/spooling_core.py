"""The core of a client with a spool: its sender and its topics go on without a
broker.
"""

from __future__ import annotations

from os import fspath
from pathlib import Path

from txmq.client.blocking.core import BlockingCore
from txmq.client.blocking.sender.sender import Sender
from txmq.client.blocking.sender.spooling import SpoolingSender
from txmq.client.protocol.conversation import client_closed
from txmq.client.protocol.message_search import MessageSearch
from txmq.client.protocol.sender.spool_chain import SpoolChain
from txmq.client.protocol.sender.spool_drain import InDoubt, Skip
from txmq.client.protocol.sender.spool_topics import SpoolTopics
from txmq.client.protocol.settings import no_spool
from txmq.errors import UnknownTopic
from txmq.recover.local.spools import SpoolDirectory


class SpoolingCore(BlockingCore):
    """The shared state of a client with a spool. After a fork each process has its own
    spool.
    """

    topics: SpoolTopics
    _chain: SpoolChain | None = None

    @property
    def chain(self) -> SpoolChain:
        """The spools of this process, opened at their first use.

        Raises StoreError where they cannot be opened.
        """
        with self._lock:
            return self._open_chain()

    def _open_chain(self) -> SpoolChain:
        if self._chain is None:
            if self.closed:
                raise client_closed()
            settings, log_id = self.settings, self.known_log_id
            if settings.spool is None:
                raise no_spool()
            directory = SpoolDirectory(str(Path(fspath(settings.spool)).absolute()))
            self._chain = SpoolChain(
                directory, settings.spool_bytes, settings.service, log_id, self.incarnation
            )
            self.topics.use(directory)
        return self._chain

    def after_fork(self) -> None:
        sender, chain, self._chain = self._sender, self._chain, None
        super().after_fork()
        if sender is None and chain is not None:
            chain.abandon()

    def close(self, timeout: float) -> None:
        sender = self._sender
        super().close(timeout)
        chain = self._chain
        if sender is None and chain is not None:
            chain.close()

    def _new_topics(self) -> SpoolTopics:
        settings = self.settings
        return SpoolTopics(self._describe, settings.partitioner, settings.body_compression)

    def _new_sender(self) -> Sender:
        chain = self._open_chain()
        sender = SpoolingSender(
            self._connect, self.topics, chain, self._is_stored, self._skip, self.settings
        )
        sender.start()
        return sender

    def _is_stored(self, message: InDoubt) -> bool:
        """Return whether the broker has a message. Raises as a call."""
        search = MessageSearch(message.topic, message_id=message.message_id)
        try:
            while (asked := search.next_call()) is not None:
                if search.read_reply(self.call(*asked, repeat=True)):
                    return True
        except UnknownTopic:
            pass
        return False

    def _skip(self, skip: Skip) -> None:
        """Tell the broker that nothing before a sequence comes. Raises as a call."""
        session, epoch, sequence = skip
        args = {"producer": session.hex(), "epoch": epoch, "sequence": sequence}
        self.call("producer.skip", args, repeat=True)
