"""Blocking and non-blocking connections to a broker, and a pool of them."""
