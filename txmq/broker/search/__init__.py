"""Messages looked up, by id, key, time and place: in a running broker, and in a log
that none has open.
"""
