"""Connections to a broker: one conversation without I/O, sockets that block, and the
pool that lends them out.
"""
