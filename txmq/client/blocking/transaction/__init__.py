"""Messages and other work as one decision: the broker's own, a database's, a checker's,
XA's, another manager's.
"""
