"""Receivers of alarms on this machine: an HTTP server, and an SMTP server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Queue
from socketserver import StreamRequestHandler, TCPServer, ThreadingTCPServer
from threading import Thread
from typing import Any, NamedTuple


class Post(NamedTuple):
    """A request that the HTTP server had."""

    authorization: str | None
    body: Any


class Webhook:
    """An HTTP server that keeps what it was sent. `status` is its answer."""

    def __init__(self) -> None:
        self.posts = Queue[Post]()
        self.status = 200
        self.url = ""


class Mailbox:
    """An SMTP server without encryption that keeps what it was sent."""

    def __init__(self) -> None:
        self.mails = Queue[str]()
        self.port = 0


@contextmanager
def webhook() -> Iterator[Webhook]:
    """Run an HTTP server."""
    kept = Webhook()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            kept.posts.put(Post(self.headers["Authorization"], body))
            self.send_response(kept.status)
            self.send_header("Location", "/elsewhere")
            self.end_headers()

        def log_message(self, *_args: object) -> None:
            pass

    with _serving(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as port:
        kept.url = f"http://127.0.0.1:{port}/alarms"
        yield kept


@contextmanager
def mailbox() -> Iterator[Mailbox]:
    """Run an SMTP server."""
    kept = Mailbox()

    class Handler(StreamRequestHandler):
        def handle(self) -> None:
            self.wfile.write(b"220 here\r\n")
            for line in self.rfile:
                if line.lower().startswith(b"quit"):
                    self.wfile.write(b"221 bye\r\n")
                    return
                if line.lower().startswith(b"data"):
                    self.wfile.write(b"354 go on\r\n")
                    kept.mails.put(b"".join(iter(self.rfile.readline, b".\r\n")).decode())
                self.wfile.write(b"250 ok\r\n")

    with _serving(ThreadingTCPServer(("127.0.0.1", 0), Handler)) as kept.port:
        yield kept


@contextmanager
def half_answering(beginning: bytes) -> Iterator[tuple[int, Queue[bytes]]]:
    """Run a server that begins an answer, tells the queue, and waits until its client
    leaves.
    """
    began = Queue[bytes]()

    class Handler(StreamRequestHandler):
        def handle(self) -> None:
            self.wfile.write(beginning)
            began.put(beginning)
            with suppress(OSError):
                self.rfile.read()

    with _serving(ThreadingTCPServer(("127.0.0.1", 0), Handler)) as port:
        yield port, began


@contextmanager
def _serving(server: TCPServer) -> Iterator[int]:
    with server:
        thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()
