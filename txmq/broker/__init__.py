"""The broker: an engine that makes the core's decisions durable, and services around
it.

The core (`txmq.core`) decides and knows nothing of disks or sockets. A request passes
through `reactor.protocol`, `requests`, `engine`, the core's machine and the log. The
other folders each import only those before them:

    reactor, cluster, engine, access, delivery, checkback, data_directory, search,
    background, monitoring, calls, requests; `assembly` and `service` put all of them
    together, and `process` runs the service
"""

from txmq.errors.extras import require

require(
    "broker", "jsonschema", "lmdb", "prometheus_client", "sortedcontainers", "structlog", "twisted"
)
