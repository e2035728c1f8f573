"""The printed tables: consumer groups, claims of the audit, counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.table import Table

from examples.order_flow.audit import ClaimResult

GROUP_COLUMNS: Final = (
    "unsettled", "leased", "retrying", "at_consumers", "letters", "fences", "parked",
)  # fmt: skip
MEANINGS: Final = {
    "attempted": "transactions that the orders service began",
    "killed": "processes killed with SIGKILL",
    "committed": "orders in the table",
    "checked back, committed": "no decision came; the broker found the row of the token",
    "checked back, rolled back": "no decision came; the broker found no row and fenced the token",
    "delivered": "messages delivered to payment and shipping, and again after a rollback",
    "retried": "of these, after a failure or a crash",
    "stored": "failures that shipping kept on its own disk, and tried again from there",
    "spooled": "scans of parcels that waited on the disk of their producer",
    "dead": "messages that became dead letters",
    "replayed": "of these, delivered again after the fix",
    "abandoned": "of these, closed with a reason",
    "duplicates": "deliveries that the inbox dropped",
    "charges": "effects of payment",
    "shipments": "effects of shipping",
    "alerts": "new errors, floods and old letters that the watch told, each once",
}


def groups_table(groups: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return a table of the consumer groups."""
    table = Table("consumer group", *GROUP_COLUMNS, title="Consumer groups", title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, group in groups.items():
        table.add_row(name, *(f"{group[column]:,}" for column in GROUP_COLUMNS))
    return table


def claims_table(results: Sequence[ClaimResult]) -> Table:
    """Return a table of the claims and their contradictions."""
    table = Table("claim", "contradictions", title="Audit", title_justify="left")
    table.columns[1].justify = "right"
    for result in results:
        examples = (
            f"{result.contradictions:,}: {result.examples}" if result.contradictions else "none"
        )
        table.add_row(result.claim, examples, style="bold red" if result.contradictions else "")
    return table


def counts_table(counts: Mapping[str, int]) -> Table:
    """Return a table of the counts."""
    table = Table("counted", "", "what it is", title="Counts", title_justify="left")
    table.columns[1].justify = "right"
    for what, count in counts.items():
        table.add_row(what, f"{count:,}", MEANINGS[what])
    return table
