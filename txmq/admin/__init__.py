"""Console, health checks, metrics and JSON of a broker over HTTP.

All of it is read-only. Changes are made with commands.
"""
