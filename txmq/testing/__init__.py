"""Test support for txmq and for services that use it: servers, faults, Java for Spark,
waiting.

`txmq.testing.plugin` has the fixtures of pytest for services (docs/TESTING.md):

    def test_an_order_is_announced(txmq_client): ...
"""
