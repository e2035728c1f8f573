"""A broker of FastStream whose queues are topics of txmq.

broker = TxmqBroker("txmq://127.0.0.1:7650", group="billing")
app = FastStream(broker)

@broker.subscriber("orders", atomic=True)
@broker.publisher("invoices")
async def bill(order: Order) -> Invoice: ...
"""

from txmq_faststream.annotations import Client, TxmqMessage
from txmq_faststream.broker import TxmqBroker
from txmq_faststream.response import TxmqResponse
from txmq_faststream.router import TxmqPublisher, TxmqRoute, TxmqRouter
from txmq_faststream.testing import TestTxmqBroker

__all__ = [
    "Client",
    "TestTxmqBroker",
    "TxmqBroker",
    "TxmqMessage",
    "TxmqPublisher",
    "TxmqResponse",
    "TxmqRoute",
    "TxmqRouter",
]
