"""The data directory: opened, maintained, verified, dumped and rebuilt."""
