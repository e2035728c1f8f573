"""The data source `txmq`: options, and what reads and writes messages and letters.

It knows no jobs: it runs in any session that registers it.
"""
