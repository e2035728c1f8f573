"""`python -m txmq_spark` and `spark-submit .../txmq_spark/__main__.py` run the command
`txmq-spark`.
"""

import sys
from pathlib import Path

# A program that is started by its path has its directory first: modules of this package
# would be found under their bare names.
sys.path[:] = [place for place in sys.path if Path(place) != Path(__file__).parent]

from txmq.errors.base import TxmqError  # noqa: E402

try:
    from txmq_spark.commands.command_line import main
except TxmqError as error:  # PySpark is missing, or too old
    sys.exit(f"txmq: {error}")

sys.exit(main())
