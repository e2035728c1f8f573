"""A broker of several nodes: the log is in a partition of Kafka.

`kafka_partition` is the partition (`txmq.store.shared.partition`), `kafka_topic` makes
its topic and looks at it before a node starts, `kafka_client` has what both tell Kafka.
"""

from txmq.errors.extras import require

require("kafka", "confluent_kafka")
