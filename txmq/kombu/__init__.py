"""A transport of Kombu: Celery's tasks are messages of txmq (extra `celery`).

    import txmq.kombu                                   # knows URLs that begin with txmq://
    app = Celery("shop", broker="txmq://127.0.0.1:7650/shop")

A queue is a topic with a consumer group, both named `kombu.q.QUEUE`. A message stays
leased to the worker that has it, and goes to another one when that worker dies, within
seconds, however long its tasks take. `acks_late`, retries, `reject` and the result
backend work as Celery documents them. A task with a countdown or an eta waits at the
broker, not in a worker. A task that is rejected without requeue is a dead letter, which
`txmq dlq` shows. The partitions of a queue are divided among its consumers, so that it
is in order by partition only. Priorities are ignored.

Which queues are bound to an exchange is known to all programs of a virtual host
(`bindings`). Remote control, events and replies are for those who listen now: each
exchange has a topic for them, which its listeners read from its end.
"""

from __future__ import annotations

from txmq.errors.extras import require

require("celery", "kombu")

from kombu.transport import TRANSPORT_ALIASES

from txmq.kombu.transport import Transport as Transport

TRANSPORT_ALIASES["txmq"] = "txmq.kombu:Transport"
