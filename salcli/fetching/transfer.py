"""One HTTP request: ask for what is missing, append it to a file, and say in plain words what went wrong."""

from __future__ import annotations

import errno
import shutil
import socket
from http.client import HTTPException
from typing import TYPE_CHECKING, Any, Protocol
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from salcli import __version__

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from salcli.progress import Task

CHUNK = 1 << 18
TIMEOUT = 30.0  # seconds without a single byte
USER_AGENT = f"salcli/{__version__} (data set download)"
RANGE_NOT_SATISFIABLE = 416
WORTH_ANOTHER_TRY = {408, 425, 429, 500, 502, 503, 504}
MEANING = {
    401: "it wants a login",
    403: "it does not let us in",
    404: "the file is not there any more",
    410: "the file was taken away",
}
PAGE_STARTS = (b"<!doctype html", b"<html", b"<?xml", b"<head")


class Refused(Exception):  # noqa: N818 (it never leaves this package)
    """This address will not give the file, however often it is asked."""


class Interrupted(Exception):  # noqa: N818
    """The transfer broke off; another attempt may do better."""


class Unwritable(Exception):  # noqa: N818
    """What arrives cannot be stored."""


class Satisfied(Exception):  # noqa: N818
    """Nothing is missing."""


class Response(Protocol):
    """What an opener gives."""

    status: int
    headers: Any

    def read(self, n: int, /) -> bytes:
        """Up to n bytes."""
        ...

    def close(self) -> None:
        """Hang up."""
        ...


class Opener(Protocol):
    """Sends a request, like urllib's urlopen."""

    def __call__(self, request: Request, *, timeout: float) -> Response:
        """The response, or urllib's errors."""
        ...


def open_url(request: Request, *, timeout: float) -> Response:
    """urllib, for the web only."""
    if urlsplit(request.full_url).scheme not in ("http", "https"):
        raise URLError("only http and https addresses are fetched")
    response: Response = urlopen(request, timeout=timeout)
    return response


def transfer(url: str, part: Path, task: Task, opener: Opener = open_url) -> None:
    """Fetch what `part` lacks. Raises Interrupted, Refused, Unwritable, or Satisfied where nothing is missing."""
    n_here = part.stat().st_size if part.exists() else 0
    response = _ask(url, n_here, opener)
    try:
        if not _continues(response, n_here):
            n_here = 0  # the server does not know ranges, and begins anew
        expected = _length(response.headers)
        part.parent.mkdir(parents=True, exist_ok=True)  # not before: a refusal leaves no empty folders behind
        _check_room(part, expected)
        chunk = _read(response)
        if not n_here and _is_page(response, chunk):  # before a part that is worth keeping is overwritten
            raise Refused("it sent a web page instead of the file (a login, a quota or an error page)")
        received = 0
        with part.open("ab" if n_here else "wb") as target:
            while chunk:
                target.write(chunk)
                received += len(chunk)
                task.advance(len(chunk))
                chunk = _read(response)
    finally:
        response.close()
    if expected is not None and received < expected:
        raise Interrupted(f"the connection broke after {n_here + received:,} of {n_here + expected:,} bytes")


def _ask(url: str, n_here: int, opener: Opener) -> Response:
    # identity: a server that compresses on the way would make lengths and ranges meaningless
    headers = {"User-Agent": USER_AGENT, "Accept-Encoding": "identity"}
    if n_here:
        headers["Range"] = f"bytes={n_here}-"
    try:
        return opener(Request(url, headers=headers), timeout=TIMEOUT)
    except HTTPError as error:
        error.close()
        if error.code == RANGE_NOT_SATISFIABLE and n_here:
            raise Satisfied from None
        kind = Interrupted if error.code in WORTH_ANOTHER_TRY else Refused
        meaning = MEANING.get(error.code, error.reason)
        raise kind(f"the server answered {error.code} ({meaning})") from None
    except (URLError, HTTPException, OSError) as error:
        raise _explained(getattr(error, "reason", error), url) from None


def _explained(reason: object, url: str) -> Exception:
    host = urlsplit(url).hostname
    if isinstance(reason, socket.gaierror):
        return Refused(f"no name server knows {host} (is there a network?)")
    if isinstance(reason, TimeoutError):
        return Interrupted(f"no answer from {host} for {TIMEOUT:.0f} s")
    if isinstance(reason, ConnectionRefusedError):
        return Refused(f"no connection to {host} (is a proxy or a firewall in the way?)")
    if isinstance(reason, OSError) and reason.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH):
        return Refused(f"{host} is out of reach (is there a network?)")
    if isinstance(reason, (ConnectionError, HTTPException)):
        return Interrupted(f"the connection broke ({reason or type(reason).__name__})")
    return Refused(str(reason))


def _continues(response: Response, n_here: int) -> bool:
    asked_for = f"bytes {n_here}-"
    return response.status == 206 and str(response.headers.get("Content-Range", asked_for)).startswith(asked_for)


def _length(headers: Mapping[str, str]) -> int | None:
    text = headers.get("Content-Length") or ""
    return int(text) if text.isdigit() else None


def _check_room(part: Path, expected: int | None) -> None:
    free = shutil.disk_usage(part.parent).free
    if expected is not None and expected > free:
        raise Unwritable(f"the disk has {free / 1e6:,.0f} MB left, {expected / 1e6:,.0f} MB are needed")


def _read(response: Response) -> bytes:
    try:
        return response.read(CHUNK)
    except (HTTPException, OSError) as error:
        raise Interrupted(f"the connection broke ({error or type(error).__name__})") from None


def _is_page(response: Response, start: bytes) -> bool:
    declared = str(response.headers.get("Content-Type", "")).lower()
    return declared.startswith("text/html") or start.lstrip().lower().startswith(PAGE_STARTS)
