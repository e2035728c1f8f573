"""Checks of `txmq doctor`, before or beside a running broker."""
