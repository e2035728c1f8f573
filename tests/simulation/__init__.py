"""The whole broker over a disk, a clock and a network that one seed drives.

`simulation` runs a seed, `invariants` has the checks, `planted_bugs` proves them.
"""
