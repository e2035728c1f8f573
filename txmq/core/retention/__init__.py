"""Rules of retention: the expiry of messages, dead letters and outcomes, and the end of
the log that is still needed.
"""
