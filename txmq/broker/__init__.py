"""The broker: a pure core (`core`), the engine that makes it durable, and the protocol
that lets clients in.
"""
