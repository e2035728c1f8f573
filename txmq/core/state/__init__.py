"""The state of a broker as data: plain objects and table rows that the rules read and
events change.
"""
