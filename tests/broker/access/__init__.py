"""Tests of users, logins and permissions."""
