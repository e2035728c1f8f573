"""Replay plans and policies: letters of a group that are put back, or abandoned, at a
rate (docs/decisions/0093).
"""
