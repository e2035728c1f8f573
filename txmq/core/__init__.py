"""The rules of the broker as pure functions: `decide(state, command, now)` judges a
command, `apply(state, event, context)` records an event.
"""
