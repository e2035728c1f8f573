"""The whole system as real processes.

Brokers, services, consumers, relays and database servers are killed while they work.
"""
