"""The timed connection reads every form of an HTTP/1.1 answer, however its bytes are cut, and says what is broken."""

from __future__ import annotations

import asyncio

import pytest

from gemq.eval.wire import Answer, Wire, WireError

LENGTH = b"HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\nhello world"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n6;x=y\r\nhello \r\n5\r\nworld\r\n0\r\nTrailer: t\r\n\r\n"
TO_THE_END = b"HTTP/1.1 200 OK\r\n\r\nhello world"


async def ask(reply: bytes, step: int, *, close: bool, times: int = 1) -> tuple[list[Answer], int]:
    """The answers to `times` requests, `reply` sent `step` bytes at a time, and how many connections were made."""
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
                for start in range(0, len(reply), step):
                    writer.write(reply[start : start + step])
                    await writer.drain()
                    await asyncio.sleep(0)
                if close:
                    return
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    wire = Wire(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1")
    called: list[int] = []
    answers = []
    try:
        for number in range(times):
            answers.append(await wire.post("/x", b"{}", streamed=bool(number % 2), meanwhile=lambda: called.append(1)))
    finally:
        await wire.close()
        server.close()
    assert len(called) >= times
    return answers, connections


@pytest.mark.parametrize("step", [1, 2, 7, 1000])
@pytest.mark.parametrize(("reply", "close"), [(LENGTH, False), (CHUNKED, False), (TO_THE_END, True), (LENGTH, True)])
def test_every_form_of_an_answer(reply: bytes, close: bool, step: int) -> None:
    answers, connections = asyncio.run(ask(reply, step, close=close, times=3))
    assert [answer.response.content for answer in answers] == [b"hello world"] * 3
    assert all(answer.response.status_code == 200 and answer.started < answer.ended for answer in answers)
    assert connections == (3 if close else 1)


@pytest.mark.parametrize(("reply", "word"), [
    (LENGTH[:-1], "middle"), (CHUNKED[:60], "middle"), (b"", "without an answer"), (b"garbage\r\n\r\n", "no HTTP"),
    (CHUNKED.replace(b"6;x=y", b"zz"), "no size"), (b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n", "no HTTP"),
])  # fmt: skip
def test_broken_answers(reply: bytes, word: str) -> None:
    with pytest.raises(WireError, match=word):
        asyncio.run(ask(reply, 1000, close=True))


def test_nothing_listens() -> None:
    async def try_it() -> None:
        await Wire("http://127.0.0.1:1/v1").post("/x", b"", streamed=False, meanwhile=lambda: None)

    with pytest.raises(WireError):
        asyncio.run(try_it())


def test_statuses_and_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    seen: list[bytes] = []

    async def try_it() -> int:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            seen.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        wire = Wire(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1")
        return (await wire.post("/completions", b"{}", streamed=False, meanwhile=lambda: None)).response.status_code

    assert asyncio.run(try_it()) == 404
    assert seen[0].startswith(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:")
    assert b"Authorization: Bearer secret\r\n" in seen[0]
