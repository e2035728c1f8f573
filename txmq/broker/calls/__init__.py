"""Control calls: requests of operators and clients by name, with JSON both ways."""
