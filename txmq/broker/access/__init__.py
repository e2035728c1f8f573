"""Access: the table of permissions that requests need, and logins."""
