"""What `txmq doctor` looks at, before or beside a running broker."""
