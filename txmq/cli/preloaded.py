"""Preparations of a server that forks commands, which it imports last.

Each command would have to do them for itself.
"""

from __future__ import annotations

import gc

from txmq.cli.app import command_line

command_line()
gc.collect()
# A process that walks the objects of the server gets a copy of all their pages.
gc.freeze()
