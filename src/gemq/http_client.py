"""How gemq talks to a served model: one place for proxy, API key and deadlines.

This machine's loopback is asked directly, whatever HTTP_PROXY, HTTPS_PROXY and ALL_PROXY say: a proxy can't reach it. For other hosts the
environment's proxy and NO_PROXY count. The key in VLLM_API_KEY, the variable that vLLM's own server reads, goes into every request's header. No
client follows a redirect, so the key reaches no other host.
"""

from __future__ import annotations

import ipaddress
import os
from urllib.parse import urlsplit

import httpx

from gemq.errors import UsageError

KEY_VARIABLE = "VLLM_API_KEY"
CONNECT_SECONDS, READ_SECONDS = 10.0, 600.0


def is_loopback(url: str) -> bool:
    """Whether `url` means this machine itself: localhost, 127.0.0.0/8, ::1, or the unspecified address."""
    host = (urlsplit(url).hostname or "").rstrip(".")
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None) or address
    return bool(mapped.is_loopback or mapped.is_unspecified)


def headers() -> dict[str, str]:
    """The header with the API key of the environment, none where there is no key; raises UsageError for one that no header can carry."""
    key = os.environ.get(KEY_VARIABLE)
    if not key:
        return {}
    if not (key.isascii() and key.isprintable() and key == key.strip()):  # the HTTP library's own error would print the key
        raise UsageError(f"{KEY_VARIABLE} holds a character that an HTTP header can't carry, such as a line break",
                         "set it to the key alone: printable ASCII without spaces around it")
    return {"Authorization": f"Bearer {key}"}


def open_client(base_url: str, timeout: float = READ_SECONDS) -> httpx.Client:
    """A client of the server at `base_url`, against which paths are resolved; `timeout` is seconds of silence."""
    return httpx.Client(base_url=base_url, timeout=httpx.Timeout(timeout, connect=min(timeout, CONNECT_SECONDS)), headers=headers(),
                        trust_env=not is_loopback(base_url), follow_redirects=False)


def key_advice(status: int) -> str:
    """What to do where a server answers `status` since it wants another API key; "" for any other status."""
    if status not in (401, 403):
        return ""
    return f"put the server's API key into the environment variable {KEY_VARIABLE}"


def child_environment() -> dict[str, str]:
    """The environment for a process that asks an endpoint as OpenAI's clients do: gemq's key in OPENAI_API_KEY, never the user's own."""
    made = {name: value for name, value in os.environ.items() if name != "OPENAI_API_KEY"}
    return made | ({"OPENAI_API_KEY": os.environ[KEY_VARIABLE]} if headers() else {})
