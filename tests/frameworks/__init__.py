"""Task queues and frameworks on txmq."""
