r"""Classify the dead letters of a consumer group by the log and the database, and write
a plan to replay them.

    spark-submit spark/reconcile.py --group billing --dsn postgresql://... \
        --plan plan --report report.html
"""

import sys

from txmq_spark.commands.command_line import reconcile_main

if __name__ == "__main__":
    sys.exit(reconcile_main())
