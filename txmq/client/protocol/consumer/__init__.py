"""Consuming without I/O: what a member of a consumer group asks and holds; both faces
of the client drive it.
"""
