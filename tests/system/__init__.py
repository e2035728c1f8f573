"""The whole, as real processes: brokers, services and database servers that are killed
while they work.
"""
