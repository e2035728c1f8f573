"""The blocking face of the client: each call returns when it is done, on the caller's
thread.
"""
