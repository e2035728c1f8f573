"""The state of a broker as data: plain objects and table rows, without rules."""
