"""The whole broker over a disk, a clock and a network that one seed drives; see `world`
for the parts and `verdict` for what must hold.
"""
