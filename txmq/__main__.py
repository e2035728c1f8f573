"""`python -m txmq` is `txmq`."""

from txmq.cli.app import main

main()
