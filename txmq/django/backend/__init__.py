"""The database backend: PostgreSQL's, whose COMMIT takes messages along."""
