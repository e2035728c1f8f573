"""Catalogues: indexes from message keys and ids to batches."""
