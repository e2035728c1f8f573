"""The data directory: kept within its limits, read again for rot, catalogued, mended
while no broker runs.
"""
