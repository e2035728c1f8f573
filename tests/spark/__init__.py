"""Tests of the Spark package: most need no JVM; those that do share one session."""
