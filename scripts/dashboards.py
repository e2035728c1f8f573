"""Writes Grafana's dashboards: `python scripts/dashboards.py [FOLDER]`.

A dashboard is a list of rows of panels; a panel is a title, a unit and queries with
their legends. Metrics of PostgreSQL are those of postgres_exporter.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parents[1] / "packaging" / "grafana"
WIDTH, HEIGHT = 24, 8


class Panel(NamedTuple):
    """A time series; its queries are (PromQL, legend)."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]


def quantiles(metric: str) -> tuple[tuple[str, str], ...]:
    rate = f'sum by (le) (rate({metric}_bucket{{instance=~"$instance"}}[5m]))'
    return tuple((f"histogram_quantile({q}, {rate})", f"p{q * 100:g}") for q in (0.5, 0.99))


def at(expression: str) -> str:
    """Return an expression for the instances that are chosen; `@` stands for them."""
    return expression.replace("@", '{instance=~"$instance"}')


def one(expression: str, legend: str = "") -> tuple[tuple[str, str], ...]:
    return ((at(expression), legend),)


DASHBOARDS: dict[str, tuple[tuple[Panel, ...], ...]] = {
    "overview": (
        (
            Panel("Messages in", "cps", one("sum(rate(txmq_topic_messages_total@[1m]))", "sent")),
            Panel(
                "Messages processed",
                "cps",
                one(
                    "sum by (consumergroup) (rate(txmq_consumergroup_messages_total@[1m]))",
                    "{{consumergroup}}",
                ),
            ),
            Panel("Time to disk", "s", quantiles("txmq_flush_seconds")),
        ),
        (
            Panel("Alarms", "short", one("txmq_alarm@ == 1", "{{name}}")),
            Panel(
                "Disk",
                "bytes",
                (
                    *one("txmq_disk_free_bytes@", "free"),
                    *one("txmq_log_end_bytes@ - txmq_log_durable_bytes@", "not on disk yet"),
                ),
            ),
            Panel(
                "Process",
                "short",
                (
                    *one("rate(process_cpu_seconds_total@[1m])", "processors"),
                    *one("process_resident_memory_bytes@ / 1048576", "MiB resident"),
                    *one("process_open_fds@", "open files"),
                ),
            ),
        ),
        (
            Panel("Largest topics", "bytes", one("topk(10, txmq_topic_bytes@)", "{{topic}}")),
            Panel("Delayed messages", "short", one("txmq_delayed_messages@", "delayed")),
            Panel("Unprocessed", "short", one("topk(10, txmq_group_unprocessed@)", "{{group}}")),
        ),
        (
            Panel("Cluster: who leads", "short", one("txmq_cluster_leader@", "{{instance}}")),
            Panel("Cluster: nodes behind", "s", one("txmq_cluster_lag_seconds@", "{{node}}")),
            Panel(
                "Cluster: Kafka",
                "short",
                (
                    *one("txmq_cluster_unconfirmed_seconds@", "seconds unconfirmed"),
                    *one("rate(txmq_cluster_claims_total@[5m])", "claims {{instance}}"),
                    *one("rate(txmq_cluster_questions_total@[5m])", "questions"),
                ),
            ),
        ),
    ),
    "transactions": (
        (
            Panel(
                "Undecided",
                "short",
                (
                    *one("txmq_transactions_undecided@", "undecided"),
                    *one("txmq_transactions_in_doubt@", "in doubt"),
                    *one("txmq_transactions_waiting@", "waiting for their key"),
                    *one("txmq_transactions_open@", "without their last part"),
                ),
            ),
            Panel(
                "Oldest undecided",
                "s",
                one("txmq_transactions_oldest_undecided_seconds@", "oldest"),
            ),
            Panel("Time to the decision", "s", quantiles("txmq_decision_seconds")),
        ),
        (
            Panel(
                "Decisions",
                "cps",
                one("sum by (outcome, by) (rate(txmq_decisions_total@[5m]))", "{{outcome}} {{by}}"),
            ),
            Panel(
                "Check-backs",
                "cps",
                one("sum by (kind, answer) (rate(txmq_checks_total@[5m]))", "{{kind}} {{answer}}"),
            ),
            Panel(
                "Refused",
                "cps",
                (
                    *one("rate(txmq_conflicts_total@[5m])", "contradictions"),
                    *one("rate(txmq_no_resolver_total@[5m])", "unknown databases"),
                ),
            ),
        ),
        (
            Panel("Resolvers", "short", one("txmq_resolver_up@", "{{resolver}}")),
            Panel("Order tickets", "short", one("txmq_order_tickets@", "tickets")),
            Panel(
                "Decided by hand",
                "short",
                one("txmq_transactions_heuristic@", "not forgotten"),
            ),
        ),
    ),
    "groups": (
        (
            Panel("Unprocessed", "short", one("txmq_group_unprocessed@", "{{group}}")),
            Panel(
                "Age of the oldest message",
                "s",
                one("txmq_group_unprocessed_seconds@", "{{group}}"),
            ),
            Panel(
                "Processed",
                "cps",
                one(
                    "sum by (consumergroup) (rate(txmq_consumergroup_messages_total@[1m]))",
                    "{{consumergroup}}",
                ),
            ),
        ),
        (
            Panel("Members", "short", one("txmq_group_members@", "{{group}}")),
            Panel("Leased", "short", one("txmq_group_leased@", "{{group}}")),
            Panel("In retry", "short", one("txmq_group_retrying@", "{{group}}")),
        ),
        (
            Panel("Keys with a fence", "short", one("txmq_group_fences@", "{{group}}")),
            Panel("Parked behind fences", "short", one("txmq_group_parked@", "{{group}}")),
            Panel(
                "At consumers",
                "short",
                (
                    *one("txmq_group_at_consumers@", "{{group}}"),
                    *one("txmq_group_stores_lost@", "{{group}}: stores without owner"),
                ),
            ),
        ),
    ),
    "letters": (
        (
            Panel("Open dead letters", "short", one("txmq_group_letters@", "{{group}}")),
            Panel(
                "By error",
                "short",
                one(
                    "topk(15, sum by (consumergroup, error) (txmq_dead_letters@))",
                    "{{consumergroup}} {{error}}",
                ),
            ),
            Panel(
                "New letters in an hour",
                "short",
                one("delta(txmq_group_letters@[1h])", "{{group}}"),
            ),
        ),
        (
            Panel(
                "Replay plans",
                "short",
                one("txmq_plan_letters@", "{{plan}} {{outcome}}"),
            ),
            Panel("Paused plans", "short", one("txmq_plan_paused@ == 1", "{{plan}}")),
            Panel("Guarded groups", "short", one("increase(txmq_group_floods@[1h])", "{{group}}")),
        ),
    ),
    "postgres": (
        (
            Panel(
                "Sessions",
                "short",
                (("sum by (state) (pg_stat_activity_count)", "{{state}}"),),
            ),
            Panel(
                "Oldest transaction",
                "s",
                (("max by (datname) (pg_stat_activity_max_tx_duration)", "{{datname}}"),),
            ),
            Panel(
                "Commits and rollbacks",
                "cps",
                (
                    ("sum(rate(pg_stat_database_xact_commit[1m]))", "commits"),
                    ("sum(rate(pg_stat_database_xact_rollback[1m]))", "rollbacks"),
                ),
            ),
        ),
        (
            Panel(
                "Dead rows of txmq's tables",
                "short",
                (('pg_stat_user_tables_n_dead_tup{relname=~"txmq_.*"}', "{{relname}}"),),
            ),
            Panel(
                "Rows of the outbox and the inbox",
                "short",
                (('pg_stat_user_tables_n_live_tup{relname=~"txmq_.*"}', "{{relname}}"),),
            ),
            Panel(
                "Log kept by slots",
                "bytes",
                (("pg_replication_slots_pg_wal_lsn_diff", "{{slot_name}}"),),
            ),
        ),
    ),
}


def dashboard(name: str, rows: tuple[tuple[Panel, ...], ...]) -> dict[str, Any]:
    """Return a dashboard in Grafana's format."""
    panels = [
        {
            "id": 100 * y + x + 1,
            "type": "timeseries",
            "title": panel.title,
            "datasource": {"type": "prometheus", "uid": "$datasource"},
            "gridPos": {
                "x": x * (WIDTH // len(row)),
                "y": y * HEIGHT,
                "w": WIDTH // len(row),
                "h": HEIGHT,
            },
            "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
            "targets": [
                {"refId": chr(ord("A") + i), "expr": expression, "legendFormat": legend}
                for i, (expression, legend) in enumerate(panel.queries)
            ],
        }
        for y, row in enumerate(rows)
        for x, panel in enumerate(row)
    ]
    return {
        "uid": f"txmq-{name}",
        "title": f"txmq: {name}",
        "tags": ["txmq"],
        "schemaVersion": 39,
        "time": {"from": "now-3h", "to": "now"},
        "refresh": "30s",
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus"},
                {
                    "name": "instance",
                    "type": "query",
                    "datasource": {"type": "prometheus", "uid": "$datasource"},
                    "query": "label_values(txmq_broker_info, instance)",
                    "multi": True,
                    "includeAll": True,
                },
            ]
        },
        "panels": panels,
    }


def texts() -> dict[str, str]:
    """Return the content of each file."""
    return {
        f"{name}.json": json.dumps(dashboard(name, rows), indent=1) + "\n"
        for name, rows in DASHBOARDS.items()
    }


def main() -> None:
    """Write the files."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    for name, text in texts().items():
        (folder / name).write_text(text, "utf-8")


if __name__ == "__main__":
    main()
