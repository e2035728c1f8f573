"""Alerts of a watch: the rules that raise them, and the places that they go to."""
