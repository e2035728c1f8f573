"""What type checkers say to uses of the public names."""
