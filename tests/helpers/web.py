"""A small web server in a thread: it knows ranges or not, breaks off, refuses, and remembers what it was asked."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread


@dataclass
class Web:
    """What the server offers, how it behaves, and what it was asked for."""

    files: dict[str, bytes] = field(default_factory=dict)
    knows_ranges: bool = True
    cut_after: list[int] = field(default_factory=list)  # bytes of the body before it hangs up; one entry a request
    answers: list[int] = field(default_factory=list)  # status codes to send instead; one entry a request
    content_type: str = "application/octet-stream"
    asked: list[tuple[str, str | None]] = field(default_factory=list)  # path, Range header
    agents: set[str | None] = field(default_factory=set)
    address: str = ""

    def url(self, name: str) -> str:
        return f"{self.address}/{name}"

    @property
    def ranges(self) -> list[str | None]:
        return [asked_range for _, asked_range in self.asked]


class _Handler(BaseHTTPRequestHandler):
    web: Web

    def do_GET(self) -> None:
        web, name = self.web, self.path.removeprefix("/")
        asked_range = self.headers.get("Range")
        web.asked.append((name, asked_range))
        web.agents.add(self.headers.get("User-Agent"))
        if web.answers:
            return self._refuse(web.answers.pop(0))
        if name not in web.files:
            return self._refuse(404)
        body, start = web.files[name], 0
        if asked_range and web.knows_ranges:
            match = re.fullmatch(r"bytes=(\d+)-", asked_range)
            assert match, asked_range
            start = int(match[1])
            if start >= len(body):
                return self._refuse(416)
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(body) - start))
        self.send_header("Content-Type", web.content_type)
        self.end_headers()
        rest = body[start:]
        self.wfile.write(rest[: web.cut_after.pop(0)] if web.cut_after else rest)
        return None

    def _refuse(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Tests are silent."""


class _Server(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """Clients that hang up are part of the tests."""


@contextmanager
def serving(web: Web) -> Iterator[Web]:
    """Serve on a free port of this machine."""
    server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"web": web}))
    web.address = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield web
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
