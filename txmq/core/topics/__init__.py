"""The rules of topics and of plain sends: what they let in, when delayed messages come,
how long all is kept.
"""
