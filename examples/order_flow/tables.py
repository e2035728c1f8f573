"""What is printed as tables: consumer groups, findings, counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.table import Table

from examples.order_flow.audit import Finding

GROUP_COLUMNS: Final = ("lag", "leased", "retrying", "letters", "fences", "parked")
MEANINGS: Final = {
    "attempted": "transactions begun by the orders service",
    "killed": "processes, with SIGKILL",
    "committed": "orders in the table",
    "checked back, committed": "the producer never told; the broker found the token's row",
    "checked back, rolled back": "the producer never told; the broker found no row and fenced the token",
    "delivered": "messages handed to the handlers of payment and shipping, after a rollback once more",
    "retried": "of them: again, after a failure or a crash",
    "dead": "messages that failed for good",
    "replayed": "of them: delivered again once the cause was fixed",
    "abandoned": "of them: closed with a reason",
    "duplicates": "delivered, and dropped by the inbox",
    "charges": "effects of payment",
    "shipments": "effects of shipping",
}


def groups_table(groups: Mapping[str, Mapping[str, Any]]) -> Table:
    """Where the consumer groups stand."""
    table = Table("consumer group", *GROUP_COLUMNS, title="Consumer groups", title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, group in groups.items():
        table.add_row(name, *(f"{group[column]:,}" for column in GROUP_COLUMNS))
    return table


def findings_table(findings: Sequence[Finding]) -> Table:
    """The claims and what contradicts them."""
    table = Table("claim", "contradictions", title="Audit", title_justify="left")
    table.columns[1].justify = "right"
    for finding in findings:
        examples = (
            f"{finding.contradictions:,}: {finding.examples}" if finding.contradictions else "none"
        )
        table.add_row(finding.claim, examples, style="bold red" if finding.contradictions else "")
    return table


def counts_table(counts: Mapping[str, int]) -> Table:
    """What was counted."""
    table = Table("counted", "", "what it is", title="Counts", title_justify="left")
    table.columns[1].justify = "right"
    for what, count in counts.items():
        table.add_row(what, f"{count:,}", MEANINGS[what])
    return table
