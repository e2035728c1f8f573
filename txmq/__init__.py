"""txmq: transactional messaging for Python services that keep their data in PostgreSQL."""
