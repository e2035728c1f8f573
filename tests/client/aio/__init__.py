"""Tests of the client on asyncio."""
