"""Catalogues of keys and message ids: built beside the broker, merged, searched."""
