"""Small files of any file system that Spark knows, by Hadoop's interface in the
driver.
"""

from __future__ import annotations

from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from txmq.errors import ConfigError
from txmq_spark.session.query_errors import JobFailed


class Directory:
    """A directory, which need not exist.

    Raises ConfigError for a path that no file system takes.
    """

    def __init__(self, spark: SparkSession, path: str) -> None:
        jvm: Any = spark.sparkContext._jvm  # noqa: SLF001  # PySpark has no other way to these
        configuration = spark.sparkContext._jsc.hadoopConfiguration()  # noqa: SLF001
        self.path = path.rstrip("/") or path
        try:
            self._jvm, self._place = jvm, jvm.org.apache.hadoop.fs.Path(self.path)
            self._files = self._place.getFileSystem(configuration)
        except (PySparkException, Py4JJavaError) as error:  # Spark does not translate all
            java = error.java_exception if isinstance(error, Py4JJavaError) else None
            raise ConfigError(
                f"path {path!r}",
                f"it cannot be used: {java.getMessage() if java else error}"[:300],
                hint="name a directory of a file system that Spark has been given the classes for",
            ) from None

    def names(self) -> list[str]:
        """Return the names of files and directories in it."""
        if not self._files.exists(self._place):
            return []
        return sorted(one.getPath().getName() for one in self._files.listStatus(self._place))

    def read(self, name: str, most: int) -> str | None:
        """Return a text; None where there is no such file. Raises ValueError where it
        cannot be read, or is longer than `most` bytes.
        """
        try:
            return self._read(name, most)
        except Py4JJavaError as error:
            raise ValueError(str(error.java_exception.getMessage())) from None

    def _read(self, name: str, most: int) -> str | None:
        place = self._of(name)
        if not self._files.exists(place) or self._files.getFileStatus(place).isDirectory():
            return None
        size = self._files.getFileStatus(place).getLen()
        if size > most:
            raise ValueError(f"it has {size} bytes, and {most} at most are read")
        stream = self._files.open(place)
        try:
            return bytes(self._jvm.org.apache.commons.io.IOUtils.toByteArray(stream)).decode()
        finally:
            stream.close()

    def write(self, name: str, text: str) -> None:
        """Write a text, which is there as a whole or not at all.

        Raises JobFailed where the file system refuses the name.
        """
        unfinished = self._of(f".{name}.new")
        stream = self._files.create(unfinished, True)
        try:
            stream.write(bytearray(text.encode()))
        finally:
            stream.close()
        self.remove(name)
        # Some file systems return False instead of an error.
        if not self._files.rename(unfinished, self._of(name)):
            raise JobFailed(f"{self.path}/.{name}.new cannot be renamed to {name}")

    def remove(self, name: str) -> None:
        """Remove a file or directory, if it is there."""
        self._files.delete(self._of(name), True)

    def _of(self, name: str) -> Any:  # noqa: ANN401  # an object of Java
        return self._jvm.org.apache.hadoop.fs.Path(self._place, name)
