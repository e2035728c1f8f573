"""Recovery of XA transactions whose coordinators are gone (docs/PROTOCOL.md 3).

What they leave are prepared branches in databases and undecided bundles at brokers. The
home broker of a transaction decides; `recoverer` asks it and follows its answer.
"""
