"""Who may do what: the table of permissions that requests need, and logins."""
