"""Search for messages by key, id and time, and the catalogues that make it fast."""
