"""The client without I/O: conversation, sender, consumer, reader, transaction."""
