"""Files of exported dead letters: lines of JSON, the bodies exact in base64.

    {"txmq": "letters", "version": 1, "group": …, "exported_at": …}
    {"topic": …, "partition": …, "offset": …, …, "body": …}         one for each letter
    {"end": true, "letters": …, "sha256": …}                        of all bytes before

A file without its last line was not finished, and is refused.
"""

from __future__ import annotations

import json
import os
import time
from base64 import b64decode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, Annotated, Any, Literal, NamedTuple, NoReturn
from uuid import uuid4

from pydantic import ConfigDict, Field, ValidationError

from txmq.crashpoints import crashpoint
from txmq.errors import ConfigError, RemoteProtocolError
from txmq.errors.validation import first_mistake
from txmq.model import limits
from txmq.model.origin import origin_headers
from txmq.wire.json import WireModel, parse

LINE = limits.MESSAGE * 4 // 3 + (1 << 20)  # bytes: a body in base64, and all else
MAX_READ = 512 << 20  # bytes: an import has all of them in memory
Number = Annotated[int, Field(ge=0, lt=2**63)]


class FileHead(WireModel):
    """The first line."""

    txmq: Literal["letters"]
    version: Literal[1]
    group: str
    exported_at: Number


class FileEnd(WireModel):
    """The last line."""

    end: Literal[True]
    letters: Number
    sha256: Annotated[str, Field(pattern="[0-9a-f]{64}")]


class FileLetter(WireModel):
    """The fields of a letter that an import needs; the others are for people."""

    model_config = ConfigDict(extra="ignore")

    topic: str
    partition: Number
    offset: Number
    message_id: str | None
    key: str | None
    tag: str | None
    headers: dict[str, str]
    body: str | None = None  # None: it is damaged at the broker

    def headers_of_copy(self, group: str, by: str) -> dict[str, str]:
        """Return the headers of a message that is made of it."""
        return origin_headers(
            self.headers,
            topic=self.topic,
            partition=self.partition,
            offset=self.offset,
            group=group,
            message_id=self.message_id or "",
            by=by,
        )

    @property
    def data(self) -> bytes:
        """The bytes of the body."""
        return b64decode(self.body or "", validate=True)


class LetterWriter:
    """Writer of an export."""

    def __init__(self, out: IO[bytes], group: str) -> None:
        self._out, self._digest = out, sha256()
        self.letters = self.damaged = 0
        at = time.time_ns() // 1_000
        head = FileHead(txmq="letters", version=1, group=group, exported_at=at)
        self._line(head.model_dump())

    def write(self, letter: Mapping[str, Any]) -> None:
        """Write a letter as `dlq.list` shows it with its body."""
        self._line(letter)
        self.letters += 1
        self.damaged += "damaged" in letter

    def end(self) -> None:
        """Write the last line."""
        self._line({"end": True, "letters": self.letters, "sha256": self._digest.hexdigest()})
        self._out.flush()

    def _line(self, fields: Mapping[str, Any]) -> None:
        line = json.dumps(fields).encode() + b"\n"
        self._digest.update(line)
        self._out.write(line)


@contextmanager
def new_file(path: Path, group: str) -> Iterator[LetterWriter]:
    """Write an export: the file has its name once the block has ended, whole and on
    disk. Raises ConfigError.
    """
    if path.exists():
        raise _exists(path)
    try:
        with NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as out:
            try:
                writer = LetterWriter(out, group)
                yield writer
                writer.end()
                crashpoint("export.before_name")
                publish_file(path, out)
                crashpoint("export.after_name")
            finally:
                Path(out.name).unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            "export file",
            f"cannot write {path}: {error.strerror}",
            hint="name a file in a directory that you may write to",
        ) from None


def _exists(path: Path) -> ConfigError:
    message = f"{path} exists already"
    return ConfigError("export file", message, hint="choose another name, or move it away")


def publish_file(path: Path, out: IO[bytes]) -> None:
    """Give a finished file its name, durably. An existing file stays."""
    os.fsync(out.fileno())
    part = Path(out.name)
    try:
        os.link(part, path)
    except FileExistsError:
        raise _exists(path) from None
    part.unlink()
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


class LetterFile(NamedTuple):
    """An export that is whole; `digest` is its checksum."""

    head: FileHead
    letters: list[FileLetter]
    digest: str


class LetterCopies(NamedTuple):
    """Messages of an import: letters of a file with the headers of their copies, and
    the number of those that are damaged. `name` is that of its job: the same for the
    same file and topic.
    """

    copies: list[tuple[FileLetter, dict[str, str]]]
    damaged: int
    name: str


def copies_of(path: Path, operator: str, to: str, *, again: bool = False) -> LetterCopies:
    """Return what an import to a topic sends; with `again` under a new name. Raises
    ConfigError.
    """
    head, letters, digest = read_file(path)
    whole = [letter for letter in letters if letter.body is not None]
    try:
        copies = [(letter, letter.headers_of_copy(head.group, operator)) for letter in whole]
    except ValueError as error:
        raise ConfigError(str(path), str(error), hint="leave that letter out") from None
    name = f"import {digest} {to}" + (f" {uuid4()}" if again else "")
    return LetterCopies(copies, len(letters) - len(whole), name)


def read_file(path: Path) -> LetterFile:
    """Return the letters of an export. Raises ConfigError for what is no whole one."""
    letters: list[FileLetter] = []
    head: FileHead | None = None
    digest, end = sha256(), None
    try:
        with path.open("rb") as file:
            for number, line in enumerate(_lines(file), 1):
                if end is not None:
                    _refuse(path, number, "it goes on behind its end")
                try:
                    if head is None:
                        head = FileHead.model_validate_json(_checked(line))
                    elif line.startswith(b'{"end"'):
                        end = FileEnd.model_validate_json(_checked(line))
                        if (end.letters, end.sha256) != (len(letters), digest.hexdigest()):
                            _refuse(path, number, "it was changed: its checksum is another one")
                    else:
                        letters.append(_letter(line))
                except ValidationError as error:
                    where, reason = first_mistake(error, unit="field")
                    _refuse(path, number, f"{'.'.join(where) or 'the whole'}: {reason}")
                except (RemoteProtocolError, ValueError) as error:
                    # without the advice of the first, which is about brokers
                    _refuse(path, number, getattr(error, "message", str(error)))
                digest.update(line)
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror}", hint=EXPORT) from None
    if head is None or end is None:
        _refuse(path, 0, "it has no last line: the export was not finished")
    return LetterFile(head, letters, end.sha256)


EXPORT = "name a file that `txmq dlq export` has written"


def _letter(line: bytes) -> FileLetter:
    letter = FileLetter.model_validate_json(_checked(line))
    if letter.body is not None:
        _ = letter.data  # raises ValueError
    return letter


def _lines(file: IO[bytes]) -> Iterator[bytes]:
    read = 0
    while line := file.readline(LINE + 1):
        read += len(line)
        if read > MAX_READ:
            message = f"it has more than {MAX_READ} bytes, the most for one import"
            raise ConfigError(file.name, message, hint="export fewer letters at once: --where")
        if len(line) > LINE:
            raise ConfigError(file.name, f"it has a line of more than {LINE} bytes", hint=EXPORT)
        yield line


def _checked(line: bytes) -> bytes:
    """Return a line that is strict JSON."""
    parse(line)
    return line


def _refuse(path: Path, number: int, reason: str) -> NoReturn:
    line = f"line {number}: " if number else ""
    raise ConfigError(str(path), f"no export of dead letters: {line}{reason}", hint=EXPORT)
