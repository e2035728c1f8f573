"""The command line: `txmq`, also `python -m txmq`."""
