"""Test support for txmq and for services that use it: servers, faults, Java for Spark,
waiting.
"""
