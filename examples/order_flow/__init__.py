"""The order flow: a shop on txmq and PostgreSQL, run end to end under faults.

`services/` contains the code that a user of txmq would write. The other modules make
the input, inject faults, reconcile and replay letters, and audit the result. `python -m
examples.order_flow` runs the flow, and `flow` directs it.
"""
