"""Rules of topics, plain sends and delayed messages, and the order of keys."""
