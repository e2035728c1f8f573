"""A log that several nodes share: what counts in the partition that holds it.

A partition is a queue of records with offsets, such as Kafka's. Any node may append to
it at any time, also one that was paused for an hour, and what it appends may come
twice. So a record proves nothing by being there: `rules` decides which ones count.

`records` has their bytes. Nothing here knows a network, a clock or an event.
"""
