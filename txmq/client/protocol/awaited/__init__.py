"""Coroutines that the faces on an event loop share. They await what a face gives."""
