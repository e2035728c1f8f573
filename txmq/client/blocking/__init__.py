"""The blocking face of the client: a call returns when it is done, on its caller's
thread.
"""
