"""Migrations: each version of txmq's tables has one."""
