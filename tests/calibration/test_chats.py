"""Chats are written as the model's template writes them: tools, calls, nulls and lists; what it would drop or does not know is refused by line."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gemq.calibration.chats import Losses, chat_text, known_roles
from gemq.calibration.sets import CalibrationSet, load_calibration
from gemq.calibration.tokenize import load_tokenizer
from gemq.errors import UsageError

# as Gemma 3's: users and the model alternate, a system text goes into the first turn, any other role is written as it is named
GEMMA3 = """{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}{%- set prefix = messages[0]['content'] + '\n' -%}
{%- set loop_messages = messages[1:] -%}
{%- else -%}{%- set prefix = "" -%}{%- set loop_messages = messages -%}{%- endif -%}
{%- for message in loop_messages -%}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception("Conversation roles must alternate user/assistant") }}{%- endif -%}
{%- if message['role'] == 'assistant' -%}{%- set role = "model" -%}{%- else -%}{%- set role = message['role'] -%}{%- endif -%}
{{ '<start_of_turn>' + role + '\n' + (prefix if loop.first else "") }}
{%- if message['content'] is string -%}{{ message['content'] | trim }}
{%- elif message['content'] is iterable -%}{%- for item in message['content'] -%}{{ item['text'] | trim }}{%- endfor -%}
{%- else -%}{{ raise_exception("Invalid content type") }}{%- endif -%}
{{ '<end_of_turn>\n' }}{%- endfor -%}"""
# as Qwen3's: tools and calls are written, lists and unknown roles are dropped without a word
QWEN3 = """{%- if tools %}{{- '<tools>' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}{{- '</tools>\n' }}{%- endif %}
{%- for message in messages %}
{%- if message.content is string %}{%- set content = message.content %}{%- else %}{%- set content = '' %}{%- endif %}
{%- if message.role == "user" or message.role == "system" %}{{- '<start_of_turn>' + message.role + '\n' + content + '<end_of_turn>\n' }}
{%- elif message.role == "assistant" %}{{- '<start_of_turn>assistant\n' + content }}
{%- for call in message.tool_calls or [] %}{{- '<call>' + call.function.name + ' ' }}{{- call.function.arguments | tojson }}{{- '</call>' }}
{%- endfor %}{{- '<end_of_turn>\n' }}
{%- elif message.role == "tool" %}{{- '<response>' + content + '</response>\n' }}{%- endif %}{%- endfor %}"""
PRINTS = "{% for message in messages %}<start_of_turn>{{ message.role }}\n{{ message.content }}<end_of_turn>\n{% endfor %}"
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}]
CALLS = [{"role": "user", "content": "Is it cold in Oslo?"},
         {"role": "assistant", "content": None, "tool_calls": [
             {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}]},
         {"role": "tool", "content": "-12", "tool_call_id": "1"}, {"role": "assistant", "content": "Very."}]  # fmt: skip


@pytest.fixture
def tokenizer(chat_model: Path) -> Any:
    return load_tokenizer(chat_model)


def rendered(tokenizer: Any, template: str, messages: object, tools: object = None, losses: Losses | None = None) -> str:
    tokenizer.chat_template = template
    return chat_text(tokenizer, messages, "a.jsonl line 7", tools=tools, losses=losses)


def refused(tokenizer: Any, template: str, messages: object, tools: object = None) -> str:
    with pytest.raises(UsageError, match="line 7: ") as found:
        rendered(tokenizer, template, messages, tools)
    return found.value.message


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)])
def test_tools_calls_and_null_content_are_written(tokenizer: Any, tools: object) -> None:
    losses = Losses()
    text = rendered(tokenizer, QWEN3, CALLS, tools, losses)
    assert "<tools>" in text
    assert '<call>weather {"city": "Oslo"}</call>' in text  # the JSON text of the API is an object for the template, as vLLM hands it on
    assert "<response>-12</response>" in text
    assert "None" not in text
    assert losses.unwritten == Counter()


def test_null_is_never_printed(tokenizer: Any) -> None:
    assert "None" not in rendered(tokenizer, PRINTS, CALLS)


def test_what_the_template_refuses_is_refused(tokenizer: Any) -> None:
    assert "Invalid content type" in refused(tokenizer, GEMMA3, CALLS[:2])
    assert "alternate" in refused(tokenizer, GEMMA3, [CALLS[0], CALLS[0]])


def test_tools_and_calls_that_the_template_does_not_write_are_counted(tokenizer: Any) -> None:
    losses = Losses()
    calls = [CALLS[0], {**CALLS[1], "content": "Let me see."}]
    rendered(tokenizer, GEMMA3, calls, TOOLS, losses)
    assert losses.unwritten == {"tools": 1, "tool_calls": 1}


@pytest.mark.parametrize("template", [GEMMA3, QWEN3])
def test_lists_of_text_are_written_by_every_template(tokenizer: Any, template: str) -> None:
    text = rendered(tokenizer, template, [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}])
    assert "one" in text
    assert "two" in text


@pytest.mark.parametrize(("template", "roles"), [
    (GEMMA3, ["user", "assistant"]), (GEMMA3, ["system", "user", "assistant"]), (GEMMA3, ["user", "model"]), (QWEN3, ["system", "user", "assistant"]),
    (QWEN3, ["user", "tool"]), (PRINTS, ["system", "user", "assistant", "tool"])])  # fmt: skip
def test_the_templates_roles_are_taken(tokenizer: Any, template: str, roles: list[str]) -> None:
    text = rendered(tokenizer, template, [{"role": role, "content": f"{role} says"} for role in roles])
    assert all(f"{role} says" in text for role in roles)


@pytest.mark.parametrize("template", [GEMMA3, QWEN3, PRINTS])
@pytest.mark.parametrize("role", ["alien", "User", "human", "gpt", ""])
def test_a_role_that_the_template_passes_on_or_drops_is_refused_with_the_valid_ones(tokenizer: Any, template: str, role: str) -> None:
    message = refused(tokenizer, template, [{"role": "user", "content": "a"}, {"role": role, "content": "b"}])
    assert repr(role) in message
    assert {"user", "assistant", "system"} <= set(known_roles(tokenizer))
    assert role not in known_roles(tokenizer)
    assert "user" in message


@pytest.mark.parametrize(("messages", "tools"), [
    ([{"role": "assistant", "content": None}], None), ([{"role": "assistant", "content": None, "tool_calls": []}], None),
    ([{"role": "assistant", "content": None, "tool_calls": ["x"]}], None), ([{"role": "user", "content": 42}], None),
    ([{"role": "user", "content": ["x"]}], None), ([{"role": "user", "content": "x"}], "{"), ([{"role": "user", "content": "x"}], {"name": "f"}),
    ([{"role": "user", "content": "x"}], ["f"])])  # fmt: skip
def test_other_shapes_are_refused(tokenizer: Any, messages: object, tools: object) -> None:
    refused(tokenizer, QWEN3, messages, tools)


# --- through calibration


def load(path: Path, model: Path, samples: int = 1) -> CalibrationSet:
    return load_calibration(str(path), model_dir=model, samples=samples, length=200, seed=0)


def test_a_row_may_have_tools_and_its_line_is_named(chat_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = [{"role": "user", "content": "Is the river frozen? " * 4}, {"role": "assistant", "content": "It is."}]
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": long, "tools": TOOLS, "id": "1"}) + "\n")
    assert len(load(path, chat_model).windows) == 1
    assert "1 chats have tools" in capsys.readouterr().err  # the small model's template does not write them
    path.write_text(json.dumps({"messages": long}) + "\n\n" + json.dumps({"messages": [*long, {"role": "alien", "content": "b"}]}) + "\n")
    with pytest.raises(UsageError, match=r"chats\.jsonl line 3: .*'alien'"):
        load(path, chat_model, samples=2)
    path.write_text(json.dumps({"text": "x", "tools": TOOLS}) + "\n")
    with pytest.raises(UsageError, match="the keys are 'text', 'tools'"):
        load(path, chat_model)
