"""Events: the outcomes that the log holds, one module per subject."""
