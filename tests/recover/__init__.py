"""Recovery of XA transactions, with real databases and brokers."""
