"""Rules of consumer groups: membership, deliveries, leases, acks, failures, dead
letters.
"""
