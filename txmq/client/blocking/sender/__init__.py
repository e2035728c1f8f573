"""Sends: how messages become batches, and how batches go out, waited for (`producer`)
or not (`pipeline`).
"""
