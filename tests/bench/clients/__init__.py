"""Programs that use txmq as applications do; they print figures as JSON on the last
line.
"""
