"""What is printed as tables: consumer groups, findings, counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.table import Table

from examples.order_flow.audit import Finding

GROUP_COLUMNS: Final = ("lag", "leased", "retrying", "letters", "fences", "parked")


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
        examples = f"{finding.contradictions:,}: {finding.examples}" if finding.contradictions else "none"
        table.add_row(finding.claim, examples, style="bold red" if finding.contradictions else "")
    return table


def counts_table(counts: Mapping[str, int]) -> Table:
    """What was counted."""
    table = Table("what", "count", title="Counts", title_justify="left")
    table.columns[1].justify = "right"
    for what, count in counts.items():
        table.add_row(what, f"{count:,}")
    return table
