"""Events of the log, one module per subject, and the outcome of a decision."""
