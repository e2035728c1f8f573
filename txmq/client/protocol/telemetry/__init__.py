"""OpenTelemetry: spans and metrics of a client that was made with `telemetry=`.

The names and kinds are those of the semantic conventions for messaging, 1.44. Without
the option nothing here is imported, and no call is another than before.
"""
