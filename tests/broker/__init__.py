"""The broker around its core."""
