"""The commands of `txmq`, one module per group of commands."""
