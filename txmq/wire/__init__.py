"""The conversation of clients and broker (docs/FORMATS.md 2): bytes to values and back,
without any I/O.
"""
