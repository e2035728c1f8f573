"""Tables of a business database: read as of one moment, named by users, and mapped to
messages.
"""
