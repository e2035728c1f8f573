"""The protocol of a consumer group's member, without I/O; all faces of the client
drive it.

`member` is the state machine. What it has fetched is in the `local_queue`, what it has
to report in the `settlement`. `operations` are what users do with messages.
"""
