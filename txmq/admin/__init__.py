"""The broker over HTTP, for people, probes and Prometheus: to look at only; whatever
changes anything is a command.
"""
