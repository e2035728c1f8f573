"""Tests of the Spark package. Most need no JVM; the others share one session."""
