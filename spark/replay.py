"""Replay the letters of a plan that spark/reconcile.py has made. A plan is carried out
once, however often this program runs.

    spark-submit spark/replay.py --plan plan --dry-run
    spark-submit spark/replay.py --plan plan --canary 10
    spark-submit spark/replay.py --plan plan --to-topic repairs
"""

import sys

from txmq_spark.commands.command_line import replay_main

if __name__ == "__main__":
    sys.exit(replay_main())
