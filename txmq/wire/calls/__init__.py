"""Control calls (docs/FORMATS.md 2.3): arguments by subject, registry of all."""
