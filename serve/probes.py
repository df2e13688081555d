"""The small picture and the tone that an endpoint is asked about, made here so that nothing has to be fetched."""

from __future__ import annotations

import base64
import io
import math
import struct
import wave
import zlib


def picture(size: int = 96) -> str:
    """A PNG of a colour ramp, `size` pixels square, as a data URL."""
    rows = b"".join(b"\0" + b"".join(bytes((x * 255 // size, y * 255 // size, 128)) for x in range(size)) for y in range(size))

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0)
    raw = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(raw).decode()


def tone(seconds: float = 1.5, hertz: float = 440.0) -> str:
    """A mono WAV of 16 kHz, as base64."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16000)
        samples = (int(8000 * math.sin(2 * math.pi * hertz * i / 16000)) for i in range(int(16000 * seconds)))
        file.writeframes(b"".join(struct.pack("<h", sample) for sample in samples))
    return base64.b64encode(buffer.getvalue()).decode()
