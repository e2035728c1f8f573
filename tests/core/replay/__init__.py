"""Replay plans: what is decided and recorded of them."""
