"""One HTTP/1.1 connection for timed requests, on asyncio's own streams: what it does between two bytes on the wire is next to nothing.

On two busy cores httpx took a fifth of a millisecond for each chunk of a stream and four for a request, 3% to 8% of what was measured at
2,000 tokens a second (benchmarks/client.py); this takes less than 1%. Bytes are stamped as they arrive and read later. Proxies are not
used: what is measured through one is the proxy.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx

from gemq.http_client import CONNECT_SECONDS, READ_SECONDS, headers

_READ_BYTES = 1 << 18


class WireError(Exception):
    """The connection failed, or what came over it is no HTTP answer."""


@dataclass(frozen=True)
class Answer:
    """What came back: the status, the content, and the pieces of it with the second of the performance counter that each arrived at."""

    started: float
    ended: float
    response: httpx.Response
    pieces: tuple[tuple[float, bytes], ...]


class _Stale(Exception):
    """The server had closed the connection before this request: it is sent again over a new one."""


class _Body:
    """Takes the bytes of an answer apart as they come: head, then content by length, by chunks, or until the end of the connection."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.pieces: list[tuple[float, bytes]] = []
        self.started = self.done = False
        self._rest = b""
        self._in_head = True
        self._chunked = False
        self._left: int | None = None  # bytes until the content's or the chunk's end

    def feed(self, second: float, data: bytes) -> None:
        """Take `data`, which arrived at `second`."""
        self.started = True
        self._rest += data
        if self._in_head:
            head, found, rest = self._rest.partition(b"\r\n\r\n")
            if not found:
                return
            self._rest, self._in_head = rest, False
            self._read_head(head)
        if self._chunked:
            self._feed_chunks(second)
            return
        if self._rest:
            self.pieces.append((second, self._rest))
            self._left = None if self._left is None else self._left - len(self._rest)
            self._rest = b""
        self.done = self._left is not None and self._left <= 0

    def _read_head(self, head: bytes) -> None:
        first, *lines = head.decode("latin-1").split("\r\n")
        try:
            self.status = int(first.split(" ")[1])
            self.headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            self._chunked = "chunked" in self.headers.get("transfer-encoding", "").lower()
            length = self.headers.get("content-length")
            self._left = None if self._chunked or length is None else int(length)
        except (IndexError, ValueError):
            raise WireError(f"the answer begins with {first[:60]!r}, which is no HTTP") from None

    def _feed_chunks(self, second: float) -> None:
        while True:
            if self._left is None:
                line, found, rest = self._rest.partition(b"\r\n")
                if not found:
                    return
                try:
                    self._left = int(line.split(b";")[0], 16)
                except ValueError:
                    raise WireError(f"a chunk begins with {line[:40]!r}, which is no size") from None
                self._rest = rest
            if self._left == 0:  # the last one; what may follow until an empty line says nothing about the content
                if self._rest.startswith(b"\r\n") or b"\r\n\r\n" in self._rest:
                    self.done = True
                return
            if len(self._rest) < self._left + 2:
                return
            self.pieces.append((second, self._rest[: self._left]))
            self._rest, self._left = self._rest[self._left + 2 :], None

    def end(self) -> None:
        """The connection has ended; raises WireError unless that ends the answer."""
        if self._in_head or self._chunked or self._left is not None:
            raise WireError("the connection ended in the middle of an answer")
        self.done = True


class Wire:
    """A connection to an endpoint's base URL; opened at the first request and again where the server closed it."""

    def __init__(self, base_url: str) -> None:
        parts = urlsplit(base_url)
        self._host, self._prefix = parts.hostname or "", parts.path.rstrip("/")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        own = {"Host": parts.netloc.rpartition("@")[2], "Content-Type": "application/json", "Accept-Encoding": "identity"}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in {**own, **headers()}.items())
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._streams is None or self._streams[0].at_eof() or self._streams[1].is_closing():
            await self.close()
            async with asyncio.timeout(CONNECT_SECONDS):
                self._streams = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
        return self._streams

    async def close(self) -> None:
        """Close the connection, if there is one."""
        if self._streams is not None:
            self._streams[1].close()
            with contextlib.suppress(OSError, ssl.SSLError):
                await self._streams[1].wait_closed()
            self._streams = None

    async def post(self, path: str, body: bytes, *, streamed: bool, meanwhile: Callable[[], None]) -> Answer:
        """The answer to `body`. `meanwhile` is called while the server works: after the request is sent, or at a stream's first piece
        (again where a closed connection makes it be sent again).

        Raises WireError where the connection fails or falls silent.
        """
        request = f"POST {self._prefix}{path} HTTP/1.1\r\n{self._head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        try:
            while True:
                used = self._streams
                reader, writer = await self._connected()
                try:
                    async with asyncio.timeout(READ_SECONDS):
                        return await self._exchange(reader, writer, request, streamed, meanwhile)
                except _Stale as error:
                    await self.close()
                    if used is None or used[0] is not reader:
                        raise WireError("it closed the connection without an answer") from error
        except TimeoutError:
            await self.close()
            raise WireError(f"no answer within {READ_SECONDS:.0f} s") from None
        except OSError as error:
            await self.close()
            raise WireError(str(error) or type(error).__name__) from None
        except WireError:
            await self.close()
            raise

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes, streamed: bool,
                        meanwhile: Callable[[], None]) -> Answer:  # fmt: skip
        waiting: Callable[[], None] | None = meanwhile
        body = _Body()
        started = time.perf_counter()
        writer.write(request)  # tries the socket at once
        if not streamed and waiting is not None:
            waiting()
            waiting = None
        while not body.done:
            try:
                data = await reader.read(_READ_BYTES)
            except ConnectionError:
                if body.started:
                    raise
                raise _Stale from None
            second = time.perf_counter()
            if not data and not body.started:
                raise _Stale
            if data:
                body.feed(second, data)
            else:
                body.end()
            if waiting is not None and body.pieces:
                waiting()
                waiting = None
        if waiting is not None:
            waiting()
        if body.headers.get("connection", "").lower() == "close":
            await self.close()
        content = b"".join(piece for _, piece in body.pieces)
        return Answer(started, second, httpx.Response(body.status, content=content), tuple(body.pieces))
