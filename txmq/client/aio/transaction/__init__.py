"""Transactions on asyncio that a database, a checker or a home broker decides."""
