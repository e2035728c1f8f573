"""The pure core, and worlds to drive it in."""
