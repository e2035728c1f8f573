"""Settings of a broker, checked before anything is opened."""
