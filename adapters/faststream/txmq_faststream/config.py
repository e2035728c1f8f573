"""The settings of brokers and routers, and their log lines."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from faststream._internal.configs import BrokerConfig
from faststream._internal.logger import DefaultLoggerStorage, make_logger_state
from faststream._internal.logger.logging import get_broker_logger
from faststream.exceptions import IncorrectState

from txmq.aio import Client, Cluster
from txmq_faststream.producer import NOT_CONNECTED, NoProducer, TxmqProducer

if TYPE_CHECKING:
    from faststream._internal.basic_types import LoggerProto
    from faststream._internal.context import ContextRepo


@dataclass(kw_only=True)
class TxmqBrokerConfig(BrokerConfig):
    """What subscribers and publishers ask of their broker. `in_memory`: a
    TestTxmqBroker gives messages to the subscribers, and none joins its group.
    """

    producer: TxmqProducer = field(default_factory=NoProducer)
    group: str = ""
    in_memory: bool = False
    connected: Client | Cluster | None = field(default=None, init=False, repr=False)

    @property
    def client(self) -> Client | Cluster:
        """The client. Raises IncorrectState before the broker is connected."""
        if self.connected is None:
            raise IncorrectState(NOT_CONNECTED)
        return self.connected


class TxmqLogs(DefaultLoggerStorage):
    """Lines with the topic, the group and the message's id."""

    def __init__(self) -> None:
        super().__init__()
        self._widths = {"topic": 4, "group": 5}
        self.logger_log_level = logging.INFO

    def set_level(self, level: int) -> None:
        self.logger_log_level = level

    def register_subscriber(self, params: dict[str, Any]) -> None:
        for name, width in self._widths.items():
            self._widths[name] = max(width, len(params.get(name, "")))

    def get_logger(self, *, context: ContextRepo) -> LoggerProto:
        logger = self._get_logger_ref()
        if logger is None:
            columns = [f"%({name})-{width}s | " for name, width in self._widths.items()]
            logger = get_broker_logger(
                name="txmq",
                default_context={"topic": "", "group": ""},
                message_id_ln=10,
                fmt="".join(
                    (
                        "%(asctime)s %(levelname)-8s - ",
                        *columns,
                        "%(message_id)-10s - %(message)s",
                    )
                ),
                context=context,
                log_level=self.logger_log_level,
            )
            self._logger_ref.add(logger)
        return logger


make_logger = partial(make_logger_state, default_storage_cls=TxmqLogs)
