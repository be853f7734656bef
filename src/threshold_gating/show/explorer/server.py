"""The explorer over HTTP for this machine alone: its own files, on 127.0.0.1 and nowhere else."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import PurePosixPath
from socketserver import ThreadingTCPServer
from typing import Any
from urllib.parse import urlsplit

from threshold_gating.show.explorer import PAGE

ADDRESS = "127.0.0.1"
_NAMES = (ADDRESS, "localhost")  # by which a browser may call this machine
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
}
_HEADERS = {
    # The page runs its own scripts and sends nothing anywhere.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


class Server(ThreadingTCPServer):
    """Serves the files that it was given, by name, from memory: no path leads anywhere else.

    A TCP server rather than an HTTP server, which would ask the network for the name of this
    machine.
    """

    daemon_threads = True
    allow_reuse_address = os.name == "posix"  # elsewhere it would share a port that is in use

    def __init__(self, contents: Mapping[str, bytes], port: int) -> None:
        self.contents = contents
        super().__init__((ADDRESS, port), _Handler)

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://{ADDRESS}:{self.server_address[1]}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say what went wrong, but not that somebody left before the answer was there."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    timeout = 10  # seconds that a silent caller holds a thread
    server: Server

    def do_GET(self) -> None:  # the name that http.server calls
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, with_body: bool) -> None:
        port = self.server.server_address[1]
        # Another site whose name leads to this machine would read the page in a user's browser.
        if self.headers.get("Host") not in [f"{name}:{port}" for name in _NAMES]:
            return self.send_error(HTTPStatus.FORBIDDEN, f"call it {self.server.url}")
        name = urlsplit(self.path).path.removeprefix("/") or PAGE
        body = self.server.contents.get(name)
        if body is None:
            return self.send_error(HTTPStatus.NOT_FOUND, f"the explorer is at {self.server.url}")
        self.send_response(HTTPStatus.OK)
        headers = {"Content-Type": _TYPES[PurePosixPath(name).suffix], **_HEADERS}
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a line for each file tells nobody anything."""
