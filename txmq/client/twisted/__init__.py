"""The Twisted face of the client: each call returns a Deferred."""
