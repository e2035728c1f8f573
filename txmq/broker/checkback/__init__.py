"""Groups and their decisions: as they come in, and as databases and checkers are asked
for them.
"""
