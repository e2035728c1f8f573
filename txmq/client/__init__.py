"""The client, by its parts.

`connecting` brings bytes to a broker and back, `sending` messages, `transactions` whatever is to be one decision.
`consuming` is the member of a group without I/O, which the blocking `consumers` drive, and those of `twisted`;
`reading` does without a group. `relaying` and `recovery` are what `txmq relay` and `txmq xa recover` run.
"""

from txmq.client.blocking import Client, connect

__all__ = ["Client", "connect"]
