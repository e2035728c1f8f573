"""What handlers may ask for by its type."""

from typing import Annotated

from faststream import Context

from txmq import aio
from txmq_faststream import broker, message

Client = Annotated[aio.Client, Context("broker.client")]
TxmqMessage = Annotated[message.TxmqMessage, Context("message")]
TxmqBroker = Annotated[broker.TxmqBroker, Context("broker")]
