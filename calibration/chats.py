"""Chats as text, written by the model's own chat template as a server would have it write them.

Messages are passed as they are, with the row's tools; where a template takes no lists, the parts of a message become one text, as vLLM makes them.
What the template itself refuses is refused. What it would drop without a word is found by rendering: each message's text is replaced by a mark, and a
mark that doesn't come back means that messages of this role are not written. A template may also write any name that it is given; a role that it
treats as it treats a name nobody knows is not one of its roles.
"""

from __future__ import annotations

import copy
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gemq.calibration.special_tokens import clean_text
from gemq.calibration.tokenize import encode_text, short
from gemq.errors import UsageError

COMMON_ROLES = ("system", "user", "assistant", "tool")
"""What a template takes that writes every role's name as it is given, users' too."""
_CONTENT = "a string, or a list of {'type': 'text', 'text': …}"
_NOBODY = "gemqnobody"
Message = dict[str, Any]


@dataclass
class Losses:
    """What chats held as literals of special tokens (`special`), and what of them their template does not write (`unwritten`), counted."""

    special: Counter[str] = field(default_factory=Counter)
    unwritten: Counter[str] = field(default_factory=Counter)


def encode_messages(tokenizer: Any, messages: object, where: str, tools: object = None, losses: Losses | None = None) -> list[int]:
    """The ids of a chat in the model's own template. BOS is in them if the template writes it; `cut_windows` makes that one."""
    return encode_text(tokenizer, chat_text(tokenizer, messages, where, tools=tools, losses=losses), where)


def chat_text(
    tokenizer: Any, messages: object, where: str, more_parts: Sequence[str] = (), *, tools: object = None, losses: Losses | None = None
) -> str:
    """A chat in the model's own template.

    `messages`: [{"role": str, "content": str or [{"type": "text", "text": str}]}], content null where there are "tool_calls"; parts of the types
    `more_parts` may be among the text. `tools`: a list of JSON schemas, or that list as JSON text. Raises UsageError naming `where` without a
    template, on another shape, where the template refuses (roles that don't alternate, say), and for a role that it does not know.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise UsageError(f"{where} holds chat messages, and the model's tokenizer has no chat template (is it a base model?)",
                         "use {\"text\": …} rows, or an instruction-tuned model")
    losses = losses or Losses()
    chat = _messages(tokenizer, messages, where, more_parts, losses)
    given = _tools(tools, where)
    try:
        text = _render(tokenizer, chat, given)
    except Exception as error:  # jinja's, and whatever a template's raise_exception raises
        chat = _flattened(chat)
        try:
            text = _render(tokenizer, chat, given)
        except Exception:
            raise UsageError(f"{where}: the model's chat template refuses these messages ({short(error)})",
                             "check the roles and their order") from error
    dropped = _dropped(tokenizer, chat, given)
    if any(isinstance(chat[index]["content"], list) for index in dropped):
        chat = _flattened(chat)
        text, dropped = _render(tokenizer, chat, given), _dropped(tokenizer, chat, given)
    text = _without_printed_none(tokenizer, chat, given, text)
    unknown = [chat[index]["role"] for index in dropped] or [
        role for role in dict.fromkeys(message["role"] for message in chat) if not _knows(tokenizer, chat, given, role)
    ]  # fmt: skip
    if unknown:
        roles = known_roles(tokenizer)
        if unknown[0] in roles:
            raise UsageError(f"{where}: the model's chat template takes no message with the role {unknown[0]!r} at its place here",
                             "check the order of the messages: a system text comes first")  # fmt: skip
        raise UsageError(f"{where}: the model's chat template knows no role {unknown[0]!r}; it knows {', '.join(roles)}",
                         "rename the role, or leave the message out")
    _count_unwritten(tokenizer, chat, given, text, losses)
    return text


def known_roles(tokenizer: Any) -> list[str]:
    """The roles that the template writes and tells from a name that nobody knows, of the common ones and those that its source names."""
    named = set(re.findall(r"""['"]([a-z_]+)['"]""", str(tokenizer.chat_template))) | set(COMMON_ROLES)
    user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    places: list[tuple[list[Message], list[Message]]] = [([], []), ([], [user]), ([user], []), ([user, answer], [])]

    def taken(role: str) -> bool:
        return any(_takes(tokenizer, [*before, {"role": role, "content": "c"}, *after], len(before)) for before, after in places)

    return sorted(filter(taken, named))


def _takes(tokenizer: Any, chat: list[Message], index: int) -> bool:
    try:
        return index not in _dropped(tokenizer, chat, None) and _knows(tokenizer, chat, None, chat[index]["role"])
    except Exception:  # the template refuses it there
        return False


def _render(tokenizer: Any, messages: list[Message], tools: list[Any] | None) -> str:
    return str(tokenizer.apply_chat_template(copy.deepcopy(messages), tools=tools, tokenize=False, add_generation_prompt=False))


def _messages(tokenizer: Any, messages: object, where: str, more_parts: Sequence[str], losses: Losses) -> list[Message]:
    """The messages, their shape checked, without keys that are null; text is cleaned of a leading BOS, arguments of calls are objects."""
    if not isinstance(messages, list) or not messages:
        raise UsageError(f"{where}: messages must be a list of at least one message", "write [{\"role\": …, \"content\": …}, …]")
    made = []
    for message in messages:
        calls = message.get("tool_calls") if isinstance(message, dict) else None
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or (message.get("content") is None and not calls):
            raise UsageError(f"{where}: a message must have a role and content (or tool_calls), got {short(message)}",
                             "write {\"role\": …, \"content\": …}")
        kept = {key: value for key, value in message.items() if value is not None} | {"content": message.get("content")}
        content = kept["content"]
        if isinstance(content, str):
            kept["content"] = clean_text(tokenizer, content, where, losses.special)
        elif content is not None:
            parts = content if isinstance(content, list) else [content]
            kept["content"] = [_part(tokenizer, part, where, more_parts, losses) for part in parts]
        if calls:
            kept["tool_calls"] = [_call(call, where) for call in (calls if isinstance(calls, list) else [calls])]
        made.append(kept)
    return made


def _part(tokenizer: Any, part: object, where: str, more_parts: Sequence[str], losses: Losses) -> Message:
    if isinstance(part, dict) and part.get("type") in more_parts:
        return {key: value for key, value in part.items() if value is not None}
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise UsageError(f"{where}: content must be {_CONTENT}, got {short(part)}",
                         "write text, or {'type': 'image' or 'audio', 'path': …} in a .jsonl")
    return {"type": "text", "text": clean_text(tokenizer, part["text"], where, losses.special)}


def _call(call: object, where: str) -> Message:
    """A tool call whose arguments are an object, as servers hand it to the template, and not the JSON text that the API has."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UsageError(f"{where}: a tool call must have a function with a name, got {short(call)}",
                         "write {\"type\": \"function\", \"function\": {\"name\": …, \"arguments\": …}}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            parsed = arguments
        function = {**function, "arguments": parsed}
    kept = {key: value for key, value in call.items() if value is not None}
    return {**kept, "function": function} if "function" in call else {**kept, **function}


def _tools(tools: object, where: str) -> list[Any] | None:
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{where}: tools is no JSON ({short(error)})", "write a list of tools' JSON schemas") from None
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UsageError(f"{where}: tools must be a list of JSON schemas, got {short(tools)}", "write [{\"type\": \"function\", \"function\": {…}}]")
    return tools


def _flattened(messages: list[Message]) -> list[Message]:
    """The messages with lists of text alone joined into one text, a line a part, as vLLM does it for templates that take no lists."""
    def flat(content: Any) -> Any:
        if not isinstance(content, list) or not content:
            return content
        texts = [part["text"] for part in content if isinstance(part.get("text"), str)]
        return "\n".join(texts) if len(texts) == len(content) else content

    return [{**message, "content": flat(message["content"])} for message in messages]


def _texts(message: Message) -> list[str]:
    content = message["content"]
    found = [content] if isinstance(content, str) else [part.get("text", "") for part in content or ()]
    return [text.strip() for text in found if text.strip()]


def _dropped(tokenizer: Any, messages: list[Message], tools: list[Any] | None) -> list[int]:
    """The positions of messages whose text does not show up in the rendering: by marks in its place, by itself where the template refuses marks."""
    def marked(index: int, content: Any) -> Any:
        mark = f"gemq{index}message"
        return mark if isinstance(content, str) else [{**part, "text": mark} if part.get("type") == "text" else part for part in content]

    spoken = [index for index, message in enumerate(messages) if _texts(message)]
    try:
        text = _render(tokenizer, [{**message, "content": marked(index, message["content"])} if index in spoken else message
                                   for index, message in enumerate(messages)], tools)  # fmt: skip
    except Exception:
        text = _render(tokenizer, messages, tools)
        return [index for index in spoken if not all(part in text for part in _texts(messages[index]))]
    return [index for index in spoken if f"gemq{index}message" not in text]


def _as(messages: list[Message], role: str, other: str) -> list[Message]:
    return [{**message, "role": other} if message["role"] == role else message for message in messages]


def _passes_on(tokenizer: Any, messages: list[Message], tools: list[Any] | None, role: str) -> bool:
    """Whether the template writes `role` exactly as it would write a name that nobody knows."""
    try:
        return _render(tokenizer, _as(messages, role, _NOBODY), tools).replace(_NOBODY, role) == _render(tokenizer, messages, tools)
    except Exception:  # it refuses that name and takes this one
        return False


def _knows(tokenizer: Any, messages: list[Message], tools: list[Any] | None, role: str) -> bool:
    if not _passes_on(tokenizer, messages, tools, role):
        return True
    if _passes_on(tokenizer, [{"role": "user", "content": "a"}], None, "user"):
        return role in COMMON_ROLES
    for known in COMMON_ROLES:  # another name of a role: Gemma's own "model" is written as "assistant" is
        try:
            if known != role and _render(tokenizer, _as(messages, role, known), tools) == _render(tokenizer, messages, tools):
                return True
        except Exception:
            continue
    return False


def _without_printed_none(tokenizer: Any, messages: list[Message], tools: list[Any] | None, text: str) -> str:
    """The rendering with empty text in place of null, as a server has it, where the template would print the null."""
    if all(message["content"] is not None for message in messages):
        return text
    try:
        return _render(tokenizer, [{**message, "content": message["content"] or ""} for message in messages], tools)
    except Exception:
        return text


def _count_unwritten(tokenizer: Any, messages: list[Message], tools: list[Any] | None, text: str, losses: Losses) -> None:
    try:
        if tools is not None and _render(tokenizer, messages, None) == _render(tokenizer, messages, tools):
            losses.unwritten["tools"] += 1
    except Exception:  # without them the template refuses: they count
        pass
    names = [call.get("function", call)["name"] for message in messages for call in message.get("tool_calls") or ()]
    if any(name not in text for name in names):
        losses.unwritten["tool_calls"] += 1
