"""The asyncio face of the client: each call is a coroutine."""
