"""`python -m txmq` runs the command `txmq`."""

from __future__ import annotations

from txmq_command import main

if __name__ == "__main__":
    main()
