"""The wire protocol of clients and broker (docs/FORMATS.md 2): encoding without I/O."""
