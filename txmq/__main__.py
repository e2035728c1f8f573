"""`python -m txmq` runs the command `txmq`."""

from txmq.cli.app import main

main()
