"""Sending with blocking I/O: sends that wait for their receipts, and the sender's
thread for those that do not.
"""
