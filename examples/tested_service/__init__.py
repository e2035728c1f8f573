"""A service with its tests, as docs/TESTING.md describes them."""
