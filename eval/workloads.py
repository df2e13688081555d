"""What a benchmark asks of an endpoint: loads (how many requests, how long, how many at a time) and the prompts to send.

Two arenas' workloads are built in; a file may describe others. Prompts come from a file, or are made from a seed: words for chat requests,
token ids for the others.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from gemq.errors import UsageError
from gemq.text_files import read_text


class Load(BaseModel):
    """Requests of one kind: how many, `output_tokens` each, how many in flight; `input_tokens` is None where prompts are sent as they are."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")
    requests: int = Field(ge=1)
    output_tokens: int = Field(ge=1)
    in_flight: int = Field(default=1, ge=1)
    input_tokens: int | None = Field(default=None, ge=2)
    chat: bool = False
    streamed: bool = False
    warmups: int = Field(default=4, ge=0)
    seed: int = 1

    @model_validator(mode="after")
    def _chat_has_no_length(self) -> Load:
        if self.chat and self.input_tokens is not None:
            raise ValueError("a chat load sends its prompts as they are: leave input_tokens out, or set chat to false")
        return self

    def scaled(self, scale: float) -> Load:
        """The load with requests, lengths and requests in flight times `scale`; nothing falls below 1, prompts not below 2 tokens."""
        def less(number: int, least: int = 1) -> int:
            return max(least, round(number * scale))

        return self.model_copy(update={
            "requests": less(self.requests), "output_tokens": less(self.output_tokens), "in_flight": less(self.in_flight),
            "input_tokens": None if self.input_tokens is None else less(self.input_tokens, 2), "warmups": min(self.warmups, less(self.requests)),
        })  # fmt: skip


class Workload(BaseModel):
    """Loads that are run one after another."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    loads: tuple[Load, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _names_differ(self) -> Workload:
        if len({load.name for load in self.loads}) < len(self.loads):
            raise ValueError("two loads have the same name")
        return self

    def scaled(self, scale: float) -> Workload:
        """The workload with every load scaled."""
        return self.model_copy(update={"loads": tuple(load.scaled(scale) for load in self.loads)})


# Efficient Gemma: not streamed; LowBArena: the page says neither, streaming shows the first token's time under load
WORKLOADS = {
    "efficient-gemma": Workload(name="efficient-gemma", loads=(Load(name="single-stream", requests=128, output_tokens=512, chat=True),)),
    "lowbarena": Workload(name="lowbarena", loads=(
        Load(name="batch-8k", requests=64, input_tokens=8192, output_tokens=512, in_flight=32, streamed=True, warmups=2),
        Load(name="single-1k", requests=32, input_tokens=1024, output_tokens=256, in_flight=1, streamed=True, warmups=2),
        Load(name="batch-16k", requests=128, input_tokens=16000, output_tokens=256, in_flight=64, streamed=True, warmups=2),
    )),
}  # fmt: skip


def find_workload(name: str, scale: float = 1.0) -> Workload:
    """The built-in workload `name`, or the one that the YAML or JSON file `name` describes, scaled; raises UsageError."""
    if not 0 < scale <= 1:
        raise UsageError(f"--scale {scale:g} is not above 0 and up to 1", "0.1 asks a tenth of the requests, a tenth as long")
    if name in WORKLOADS:
        return WORKLOADS[name].scaled(scale)
    path = Path(name)
    if not path.is_file():
        raise UsageError(f"workload {name!r} is neither known nor a file", f"valid are {', '.join(WORKLOADS)}, or a .yaml that describes loads")
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
        if isinstance(found, list):
            raise UsageError(f"{path} holds a list: it looks like prompts, not a workload", "give it to --prompts")
        return Workload.model_validate(found).scaled(scale)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"{path}{': ' + where if where else ''}: {first['msg']}",
                         f"a workload has a name and loads; a load has {', '.join(Load.model_fields)}") from None  # fmt: skip
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"{path} can't be read as YAML: {str(error).splitlines()[0]}", "write a name and loads") from None


@dataclass(frozen=True)
class Prompt:
    """A prompt as text or as token ids (one of them is there), with the id that its records carry."""

    id: str
    text: str | None = None
    tokens: tuple[int, ...] | None = None

    @property
    def sha256(self) -> str:
        """The digest that a decode record carries: of the text as UTF-8, or of the ids joined by commas."""
        content = self.text if self.text is not None else ids_text(self.tokens or ())
        return hashlib.sha256(content.encode()).hexdigest()


def ids_text(ids: Sequence[int]) -> str:
    """Token ids joined by commas: what the arena's digests are taken of."""
    return ",".join(map(str, ids))


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a file, never none: a .json list in ShareGPT's shape, or a .jsonl of {id, prompt_token_ids | context_token_ids | prompt}.

    Raises UsageError that names the entry.
    """
    if path.suffix not in (".json", ".jsonl"):
        raise UsageError(f"prompts {path} end in {path.suffix or 'nothing'!r}", "give a .json in ShareGPT's shape, or a .jsonl")
    text = read_text(path)
    entries: list[tuple[str, Any]] = []
    try:
        if path.suffix == ".json":
            listed = json.loads(text)
            if not isinstance(listed, list):
                raise UsageError(f"{path} is no JSON list", "give a list of {id, conversations}")
            entries = [(f"{path} entry {number}", entry) for number, entry in enumerate(listed)]
        else:
            for number, line in enumerate(text.split("\n"), 1):
                if line.strip():
                    entries.append((f"{path} line {number}", json.loads(line)))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON{f' after {entries[-1][0]}' if entries else ''}: {error}", "write the file again") from None
    prompts = [_prompt(entry, where) for where, entry in entries]
    if not prompts:
        raise UsageError(f"{path} holds no prompts", "give a file with at least one")
    if len({prompt.id for prompt in prompts}) < len(prompts):
        raise UsageError(f"{path}: two prompts have the same id", "give every prompt its own id")
    return prompts


def _prompt(entry: object, where: str) -> Prompt:
    if not isinstance(entry, dict):
        raise UsageError(f"{where} is a {type(entry).__name__}, not an object", "each prompt is an object with an id")
    name = str(entry.get("id", where.rpartition(" ")[2]))
    for key in ("prompt_token_ids", "context_token_ids"):
        if key in entry:
            ids = entry[key]
            if not isinstance(ids, list) or not ids or not all(type(token) is int and token >= 0 for token in ids):
                raise UsageError(f"{where}: {key} is no list of token ids", "write token ids as a list of integers from 0 on")
            return Prompt(name, tokens=tuple(ids))
    said = entry.get("prompt")
    if "conversations" in entry:
        turns = entry["conversations"]
        first = turns[0] if isinstance(turns, list) and turns else None
        said = first.get("value") if isinstance(first, dict) and first.get("from") in ("human", "user") else None
    if not isinstance(said, str) or not said.strip():
        raise UsageError(f"{where} holds no prompt", "an entry has conversations (a human's first), prompt_token_ids, or prompt")
    return Prompt(name, text=said)


_TASKS = ("Explain how {a} differs from {b}, with an example from {c}.", "Write a short story in which {a} meets {b} during {c}.",
          "List the steps by which {a} could be used to study {b}, and say what {c} has to do with it.",
          "Two engineers disagree on whether {a} matters more than {b} for {c}. Give both sides, then decide.",
          "A shop sells {n} kinds of {a} and {m} of {b}. How many pairs can a visitor of {c} choose? Show each step.")  # fmt: skip
_THINGS = ("a tide table", "sourdough", "the moons of Jupiter", "a canal lock", "steel bridges", "beekeeping", "prime numbers", "a violin",
           "medieval maps", "soil bacteria", "a night train", "glass blowing", "tax forms", "weather balloons", "river deltas", "crosswords",
           "an old lighthouse", "compilers", "mountain goats", "paper money", "a chess clock", "vaccines", "cotton", "sundials")  # fmt: skip


def make_text_prompts(count: int, seed: int) -> list[Prompt]:
    """`count` different questions in plain English, from a seed."""
    rng = random.Random(seed)
    made: list[Prompt] = []
    for number in range(count):
        a, b, c = rng.sample(_THINGS, 3)
        task = rng.choice(_TASKS).format(a=a, b=b, c=c, n=rng.randrange(3, 90), m=rng.randrange(3, 90))
        made.append(Prompt(f"made-{seed}-{number}", text=f"Question {number + 1}. {task}"))
    return made


def make_token_prompts(count: int, length: int, seed: int, *, vocabulary: int, bos: int) -> list[Prompt]:
    """`count` prompts of BOS and random ids, `length` tokens each; ids of ordinary words where the vocabulary is large enough."""
    rng = random.Random(seed)
    lowest, highest = (1000, min(vocabulary, 100_000)) if vocabulary > 2000 else (min(8, vocabulary - 1), vocabulary)
    return [Prompt(f"random-{seed}-{number}", tokens=(bos, *(rng.randrange(lowest, highest) for _ in range(length - 1))))
            for number in range(count)]  # fmt: skip


def prompts_for(load: Load, given: Sequence[Prompt] | None, *, vocabulary: int, bos: int, tokenizer: Path | None = None) -> list[Prompt]:
    """The prompts of a load, at most one a request, warm-ups not counted: `given` ones in order, or made ones.

    A load with `input_tokens` takes them as one run of tokens, cut to that length. Raises UsageError where they can't be sent so.
    """
    if given is None:
        if load.chat:
            return make_text_prompts(load.requests, load.seed)
        return make_token_prompts(load.requests, load.input_tokens or 128, load.seed, vocabulary=vocabulary, bos=bos)
    if load.chat:
        without = next((prompt for prompt in given if prompt.text is None), None)
        if without is not None:
            raise UsageError(f"prompt {without.id} is token ids, and the load {load.name} is chat, which takes text",
                             "give prompts as text, or a workload without chat")  # fmt: skip
        return list(given[: load.requests])
    tokens = tokenized(given, tokenizer)
    if load.input_tokens is None:
        return tokens[: load.requests]
    stream = [token for prompt in tokens for token in (prompt.tokens or ())]
    count = min(load.requests, len(stream) // load.input_tokens)
    if not count:
        raise UsageError(f"the prompts have {len(stream)} tokens in all, and {load.name} sends {load.input_tokens} a request",
                         "give a longer file, leave --prompts out, or choose a smaller --scale")  # fmt: skip
    size = load.input_tokens
    return [Prompt(f"cut-{number}", tokens=tuple(stream[number * size : (number + 1) * size])) for number in range(count)]


def tokenized(prompts: Sequence[Prompt], tokenizer: Path | None) -> list[Prompt]:
    """The prompts as token ids; text goes through the chat template of `tokenizer`'s directory, or BOS + text where it has none."""
    if all(prompt.tokens is not None for prompt in prompts):
        return list(prompts)
    if tokenizer is None:
        raise UsageError("the prompts are text, and these requests send token ids", "give the checkpoint's directory to --tokenizer")
    from gemq.calibration.special_tokens import without_leading_bos
    from gemq.eval.records import load_tokenizer

    loaded = load_tokenizer(tokenizer)
    made = []
    for prompt in prompts:
        if prompt.tokens is not None:
            made.append(prompt)
            continue
        if getattr(loaded, "chat_template", None):
            text = loaded.apply_chat_template([{"role": "user", "content": prompt.text}], tokenize=False, add_generation_prompt=True)
            ids = loaded(text, add_special_tokens=False)["input_ids"]
        else:
            ids = loaded(without_leading_bos(loaded, prompt.text or ""), add_special_tokens=False)["input_ids"]
            ids = ids if loaded.bos_token_id is None else [loaded.bos_token_id, *ids]
        made.append(Prompt(prompt.id, text=prompt.text, tokens=tuple(ids)))
    return made
