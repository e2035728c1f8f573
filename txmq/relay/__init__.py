"""From what services emit into PostgreSQL's log (`txmq.emit`) to the broker, through a
logical slot.
"""
