"""Process and Twisted: the reactor, connections, clocks, threads, file handles,
memory.
"""
