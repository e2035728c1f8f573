"""The order flow: a shop's services on txmq and PostgreSQL, run end to end under the
faults that a business meets.

`services/` is what a user would write. All else prepares the input, injects faults,
reconciles, replays and audits: `flow` directs it, `python -m examples.order_flow` runs
it.
"""
