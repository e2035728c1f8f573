"""Stories that hold for every face of the client."""
