"""The relay of messages that services emit into PostgreSQL's log (`txmq.emit`).

It reads them through a logical slot and stores them at the broker (docs/PROTOCOL.md
2.9).
"""
