"""What the broker has of its process and of Twisted: the reactor, clocks, timers,
threads, handles, memory.
"""
