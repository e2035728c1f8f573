"""Values that every layer shares: messages, keys, retry policies, limits, states of
bundles.
"""
