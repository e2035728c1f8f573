"""What an operator has to know of without having asked."""
