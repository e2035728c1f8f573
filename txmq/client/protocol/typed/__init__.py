"""Topics whose bodies have a pydantic model."""
