"""Classes of Java that PySpark looks for again at each use."""

from __future__ import annotations

from typing import Any, Final

from pyspark.sql import SparkSession

# The classes by which PySpark makes columns and functions, under the names it asks for,
# and their methods for most of them.
KNOWN: Final = {
    "functions": ("col", "lit"),
    "org.apache.spark.sql.functions": ("col", "lit"),
    "PythonUtils": ("toSeq",),
    "PythonSQLUtils": (),
    "SimplePythonFunction": (),
}


def java_class(spark: SparkSession, name: str) -> Any:  # noqa: ANN401  # of Java
    """Return a class by its full name.

    Package by package, as in `jvm.org.apache.hadoop.fs.Path`, each part of the name
    would be searched for in all jars, as a class of each package that is imported.
    """
    return getattr(spark.sparkContext._jvm, name)  # noqa: SLF001  # PySpark has no other way to it


def keep_classes(spark: SparkSession) -> None:
    """Let this process keep classes and methods that PySpark uses for each column.

    py4j asks Java for them anew each time, and Java searches all jars for those without
    a package: for small plans that was a quarter of what the driver's threads did
    (docs/decisions/0160).
    """
    for name, methods in KNOWN.items():
        found = java_class(spark, name)
        for method in methods:
            setattr(found, method, getattr(found, method))
        setattr(spark.sparkContext._jvm, name, found)  # noqa: SLF001
