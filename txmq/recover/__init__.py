"""Recovery of XA transactions whose coordinators are gone: prepared branches in
databases, groups at brokers.

Everything is decided by the home broker of a transaction (PROTOCOLS 3): `recoverer`
asks it and follows its answer.
"""
