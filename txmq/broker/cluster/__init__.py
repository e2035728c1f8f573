"""Nodes that share one log: they follow a partition, and one of them leads."""
