"""Metrics for Prometheus, read from the state of the broker at each scrape.

exposition   all metrics in the text format, summed up for each topic and group
partitions   those of each partition, on a path of their own
broker, cluster, groups, transactions, access, throttling   the collectors, by subject

Labels are names of topics, groups and plans, so the number of series is bounded.
Nothing in messages becomes a label. docs/METRICS.md lists all of them.
"""
