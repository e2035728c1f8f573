"""Classes the dead letters of a consumer group against log and database, and freezes a
plan to replay them.

spark-submit spark/reconcile.py --group billing --dsn postgresql://... --plan plan.jsonl
--report report.html
"""

import sys

from txmq_spark.commands import reconcile_main

if __name__ == "__main__":
    sys.exit(reconcile_main())
