"""Replays the letters of a plan that spark/reconcile.py made, once, however often it is
run.

spark-submit spark/replay.py --plan plan.jsonl --dry-run
spark-submit spark/replay.py --plan plan.jsonl --canary 10
spark-submit spark/replay.py --plan plan.jsonl --outcomes outcomes.jsonl
"""

import sys

from txmq_spark.commands import replay_main

if __name__ == "__main__":
    sys.exit(replay_main())
