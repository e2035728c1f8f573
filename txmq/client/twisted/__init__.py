"""The Twisted face of the client: each call returns a Deferred."""

from txmq.errors.extras import require

require("twisted", "twisted")
