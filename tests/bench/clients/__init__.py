"""Programs that use txmq as its users do, and print what they measured: the last line
is a JSON object.
"""
