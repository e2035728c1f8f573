"""Alarms and statistics for operators."""
