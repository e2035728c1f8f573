"""Help for tests of txmq and of services that use it: servers, a Java for Spark,
waiting.
"""
