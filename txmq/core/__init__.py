"""The rules of the broker: `decide(state, command, now)` judges, `apply(state, event,
place)` records; no waiting.
"""
