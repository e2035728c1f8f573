"""The command line: `txmq`, also `python -m txmq`."""

from txmq.errors.extras import require

require("cli", "rich", "structlog", "typer")
