"""Rules about the end of things: messages, letters, outcomes and log segments that
nobody needs any more.
"""
