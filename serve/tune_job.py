"""A tune from the command line's words to the published directory: the engine asked, the load made, the search run, the profile written."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemq import atomic, output
from gemq.config_file import read_complete_config, text_config
from gemq.errors import UsageError
from gemq.eval.target import Target
from gemq.eval.workloads import Load, Prompt, find_workload, make_text_prompts, make_token_prompts, prompts_for, read_prompts, tokenized
from gemq.memory import available_bytes
from gemq.output_paths import require_separate
from gemq.quantize import seal
from gemq.serve import lowbarena
from gemq.serve.engine import EngineFacts, ask_engine
from gemq.serve.machine import gpus
from gemq.serve.profile import SHIPPED, MadeFor, read_profile
from gemq.serve.serve import DEFAULT_PROFILE, PROFILES, model_length
from gemq.serve.server import Server, find_python, starting
from gemq.serve.switches import CPU, NAMES, SWITCHES, LeftOut, Task, candidates, known_variables
from gemq.serve.trials import Question, Servers, Trial
from gemq.serve.tune import Search, Tuned, kept_in, search

WINDOW = 2000  # tokens that a candidate must still score at once
GIB = 2**30
SHARE = 0.9  # of the card, over all servers
_PROFILES, _CACHES, _MODELS = "candidates", "caches", "modelinfos"  # in OUTPUT.partial: what servers are started with, and what vLLM compiles


@dataclass(frozen=True)
class Options:
    """The command line's words."""

    target: str
    checkpoint: Path | None = None
    base: str | None = None
    workload: str = "efficient-gemma"
    requests: int = 2
    tokens: int | None = None
    pairs: int = 6
    prompts: Path | None = None
    greedy_prompts: int = 8
    greedy_tokens: int = 128
    tolerance: float = 0.0
    switches: tuple[str, ...] = ()
    drafter: Path | None = None
    minutes: float = 60.0
    start_timeout: float = 600.0
    servers: int | None = None
    confirm: bool = True
    python: Path | None = None
    verify: bool = True


@dataclass(frozen=True)
class Prepared:
    """What is to be searched and what is left out, the target, its interpreter, and how many servers fit at once."""

    search: Search
    left_out: list[LeftOut]
    target: Target
    python: Path
    room: int


def prepare(options: Options) -> Prepared:
    """Look at everything that can be looked at without a server; raises UsageError on what can't be."""
    if not 0 <= options.tolerance < float("inf"):
        raise UsageError(f"--tolerance {options.tolerance} is no number from 0 on", "give nats; 0 takes no near-ties")
    for name in options.switches:
        if name not in NAMES:
            raise UsageError(f"--switch {name!r} is unknown", f"valid are {', '.join(NAMES)}")
    target = Target.parse(options.target, options.checkpoint)
    if target.directory is None:
        raise UsageError(f"{options.target} is a URL, and tuning starts servers of its own", "give a checkpoint's or a submission's directory")
    if not any((target.directory / name).is_file() for name in ("config.json", "manifest.json", "launch.sh", "engine/launch.sh")):
        raise UsageError(f"{options.target} is neither a checkpoint (config.json) nor a submission (manifest.json, engine/launch.sh)",
                         "give the directory that gemq quantize or gemq package wrote")
    if options.drafter is not None and not (options.drafter / "config.json").is_file():
        raise UsageError(f"--drafter {options.drafter} is no checkpoint: it has no config.json", "give the drafter's directory")
    foreign = sorted(name for name in known_variables() if name.startswith("VLLM_") and name in os.environ)
    if foreign:
        raise UsageError(f"{foreign[0]} is set here, and it is a switch to try", f"unset {' '.join(foreign)}")
    base = options.base or _base_of(target, options.workload)
    if base not in PROFILES:
        raise UsageError(f"--profile {base!r} is unknown", f"valid are {', '.join(PROFILES)}")
    loads, prompts = _loads(options, target)
    greedy = _greedy_prompts(options, target)
    limit = int(os.environ.get("MAX_MODEL_LEN") or model_length(target.checkpoint))
    for load in loads:
        _require_fit(prompts[load.name], load.output_tokens, limit, load.name)
    _require_fit(greedy, options.greedy_tokens, limit, "--greedy-tokens")
    config = {} if target.checkpoint is None else read_complete_config(target.checkpoint)
    python = find_python(options.python)
    backends = next(switch for switch in SWITCHES if switch.name == "attention").values
    output.note(f"asking {python} for vLLM's switches")
    engine = ask_engine(python, head_sizes(config), [label for label, _ in backends])
    row = dict(zip(shlex.split(PROFILES[base])[::2], shlex.split(PROFILES[base])[1::2], strict=True))
    task = Task(kernel_list(config), max(load.in_flight for load in loads), int(row["--max-num-seqs"]), int(row["--max-num-batched-tokens"]),
                options.drafter is not None, _carries_plugin(target))  # fmt: skip
    offered, left_out = candidates(engine, task, options.switches)
    room = options.servers or _room(engine, target.checkpoint)
    if room > 1 and engine.platform != CPU:
        _memory_share(target.checkpoint, task.in_flight, room)  # says so now if they don't fit
    sealed = target.checkpoint is not None and (target.checkpoint / seal.SEAL_FILE).is_file()
    digest = seal.seal_digest(target.checkpoint) if sealed and target.checkpoint is not None else None
    made_for = MadeFor(vllm=engine.version, platform="cpu" if engine.platform == CPU else "cuda", card=engine.card, checkpoint=digest,
                       content=target.digest if options.verify else None)  # fmt: skip
    question = Question(loads, prompts, options.pairs, tuple(greedy), options.greedy_tokens, _window(target, limit))
    drafter = None if options.drafter is None else options.drafter.absolute()
    plan = Search(engine, task, tuple(map(tuple, offered)), question, base, made_for, drafter, 60 * options.minutes, options.tolerance,
                  options.confirm)  # fmt: skip
    return Prepared(plan, left_out, target, python, room)


def _base_of(target: Target, workload: str) -> str:
    """The row of PROFILES that a submission is started with, else the workload's usual one."""
    assert target.directory is not None
    said = ""
    manifest, line = target.directory / "manifest.json", target.directory / "engine" / "profile"
    if manifest.is_file():
        from gemq.serve.efficient_gemma import read_manifest

        said = read_manifest(target.directory)["env"].get("GEMQ_PROFILE", "")
    elif line.is_file():
        said = line.read_text(encoding="utf-8").strip()
    if said.endswith(".json"):
        return read_profile((manifest if manifest.is_file() else line).parent / said).base
    return said or (lowbarena.DEFAULT_PROFILE if workload == lowbarena.ARENA else DEFAULT_PROFILE)


def _carries_plugin(target: Target) -> bool:
    """Whether a submission brings gemq's plugin: a wheel that its manifest names, or engine/plugin."""
    assert target.directory is not None
    if (target.directory / "manifest.json").is_file():
        from gemq.serve.efficient_gemma import read_manifest

        return "GEMQ_PLUGIN" in read_manifest(target.directory)["env"]
    return (target.directory / "engine" / "plugin" / "gemq_int4").is_dir()


def _loads(options: Options, target: Target) -> tuple[tuple[Load, ...], dict[str, list[Prompt]]]:
    loads = []
    for load in find_workload(options.workload).loads:
        changed = {"requests": max(options.requests, load.in_flight), "warmups": 1, "streamed": False}
        loads.append(load.model_copy(update=changed | ({"output_tokens": options.tokens} if options.tokens else {})))
    given = None if options.prompts is None else read_prompts(options.prompts)
    prompts = {load.name: prompts_for(load, given, vocabulary=target.vocabulary, bos=target.bos, tokenizer=target.checkpoint) for load in loads}
    return tuple(loads), prompts


def _greedy_prompts(options: Options, target: Target) -> list[Prompt]:
    if options.prompts is not None:
        return tokenized(read_prompts(options.prompts)[: options.greedy_prompts], target.checkpoint)
    if target.checkpoint is not None and (target.checkpoint / "tokenizer.json").is_file():
        return tokenized(make_text_prompts(options.greedy_prompts, 1), target.checkpoint)
    return make_token_prompts(options.greedy_prompts, 32, 1, vocabulary=target.vocabulary, bos=target.bos)


def _require_fit(prompts: Sequence[Prompt], tokens: int, limit: int, what: str) -> None:
    for prompt in prompts:
        length = len(prompt.tokens or ())
        if length + tokens > limit:
            raise UsageError(f"{what}: prompt {prompt.id} of {length} tokens and {tokens} more don't fit into the {limit} that are served",
                             "give fewer --tokens or --greedy-tokens, shorter --prompts, or a longer window (MAX_MODEL_LEN)")  # fmt: skip


def _window(target: Target, limit: int) -> tuple[int, ...]:
    length = max(2, min(WINDOW, limit - 1))
    return make_token_prompts(1, length, 2, vocabulary=target.vocabulary, bos=target.bos)[0].tokens or ()


def kernel_list(config: dict[str, Any]) -> str:
    """Which of vLLM's kernel lists a checkpoint's linears go through, by its config: mp, fp8, int8, or "" if it isn't quantized."""
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict):
        return ""
    groups = quantization.get("config_groups")
    if not isinstance(groups, dict):
        return "mp"  # the gptq format
    kinds = set()
    for group in groups.values():
        weights, inputs = group.get("weights") or {}, group.get("input_activations")
        kinds.add("fp8" if weights.get("type") == "float" else "int8" if inputs else "mp")
    return next((kind for kind in ("mp", "fp8", "int8") if kind in kinds), "")


def head_sizes(config: dict[str, Any]) -> list[int]:
    """The attention heads' sizes that a config tells."""
    text = text_config(config)
    found = [text.get("head_dim"), text.get("global_head_dim")]
    if not isinstance(found[0], int) and isinstance(text.get("hidden_size"), int) and isinstance(text.get("num_attention_heads"), int):
        found[0] = text["hidden_size"] // text["num_attention_heads"]
    return [size for size in found if isinstance(size, int)]


def _bytes(checkpoint: Path | None) -> int:
    return 0 if checkpoint is None else sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))


def _room(engine: EngineFacts, checkpoint: Path | None) -> int:
    """Two servers where they fit side by side, else one."""
    if engine.platform == CPU:
        return 2 if (available_bytes() or 0) > 2 * (2 * _bytes(checkpoint) + 5 * GIB) else 1
    try:
        _memory_share(checkpoint, 1, 2)
    except UsageError:
        return 1
    return 2


def _memory_share(checkpoint: Path | None, in_flight: int, room: int) -> tuple[float, int]:
    """A server's share of the card, and the bytes of its KV cache: said to vLLM, since several that measure at once what is free would err."""
    card = min((gpu.total_bytes for gpu in gpus()), default=0.0)
    share = SHARE / room
    cache = share * card - 1.15 * _bytes(checkpoint) - 4 * GIB
    if cache < 2 * GIB:
        raise UsageError(f"{room} servers don't fit side by side on a card of {card / GIB:.0f} GiB", "give --servers 1: each start in turn")
    return share, int(min(cache, max(8, in_flight) * GIB))


def _candidate(settings: dict[str, str]) -> str:
    """The name of the files that belong to a server of `settings`."""
    return "-".join(f"{switch}-{label}" for switch, label in sorted(settings.items())).replace(" ", "-").replace("/", "-")[:150] or "baseline"


def start_with(prepared: Prepared, options: Options, folder: Path) -> Callable[[dict[str, str]], AbstractContextManager[Callable[[], Server]]]:
    """What starts a server of given settings, just as a package with that profile would be started. Logs and profiles lie in `folder`."""
    plan, target = prepared.search, prepared.target
    assert target.directory is not None
    extra = [os.environ.get("GEMQ_EXTRA_ARGS", "")]
    if prepared.room > 1 and plan.engine.platform != CPU:
        share, cache = _memory_share(target.checkpoint, plan.task.in_flight, prepared.room)
        extra.append(f"--gpu-memory-utilization {share:.3f} --kv-cache-memory-bytes {cache}")
    named = target.checkpoint if target.checkpoint not in (None, target.directory) else None
    directory = target.directory

    # (VLLM_CACHE_ROOT holds what is known of model classes too, which takes many seconds to find out: that part is shared)
    def start(settings: dict[str, str]) -> AbstractContextManager[Callable[[], Server]]:
        name = _candidate(settings)
        profile = plan.base
        if set(settings) - {"baseline"}:
            path = folder / _PROFILES / f"{name}.json"
            path.parent.mkdir(exist_ok=True)
            plan.profile(settings).write(path)
            profile = str(path.absolute())
        (folder / "logs").mkdir(exist_ok=True)
        # compiled code is kept apart: two servers that start at once would write one place, and vLLM's key for it knows nothing of plugins
        cache, models = folder / _CACHES / name, folder / _CACHES / _MODELS
        cache.mkdir(parents=True, exist_ok=True)
        models.mkdir(exist_ok=True)
        if not (cache / _MODELS).is_symlink():
            (cache / _MODELS).symlink_to(models.absolute())
        return starting(directory, profile=profile, checkpoint=named, python=prepared.python, log=folder / "logs" / f"{name}.log",
                        timeout=options.start_timeout, verify=options.verify,
                        environment={"GEMQ_EXTRA_ARGS": " ".join(filter(None, extra)), "VLLM_CACHE_ROOT": str(cache.absolute())})  # fmt: skip

    return start


def journal_key(prepared: Prepared, options: Options) -> dict[str, Any]:
    """What a search's measurements depend on: kept ones count for the same key alone."""
    plan, question = prepared.search, prepared.search.question
    return {"target": str(options.target), "seal": plan.made_for.checkpoint, "content": plan.made_for.content,
            "engine": plan.engine.key(), "profile": plan.base,
            "loads": [load.model_dump(mode="json") for load in question.loads], "room": prepared.room, "pairs": question.pairs,
            "prompts": [prompt.sha256 for some in question.prompts.values() for prompt in some],
            "window": len(question.scored), "greedy": [question.greedy_tokens, *(prompt.sha256 for prompt in question.greedy)],
            "drafter": None if plan.drafter is None else str(plan.drafter), "extra": os.environ.get("GEMQ_EXTRA_ARGS", "")}  # fmt: skip


def tune(prepared: Prepared, options: Options, output_dir: Path, told: Callable[[Trial, bool, str], None]) -> Tuned:
    """Run the search and publish `output_dir`: profile.json where something was kept, tune.json with everything that was tried, and logs.

    Raises StoppedSafely (75) or Interrupted (130) with what was kept; the same call goes on.
    """
    if not prepared.search.offered:
        raise UsageError("there is nothing to try: " + "; ".join(_told(prepared.left_out)), "see gemq tune --dry-run, or give other --switch names")
    require_separate(output_dir, *prepared.target.directories, prepared.search.drafter)
    with kept_in(output_dir, journal_key(prepared, options)) as journal:
        partial = atomic.partial_of(output_dir)
        servers = Servers(prepared.room, start_with(prepared, options, partial))
        try:
            tuned = search(prepared.search, journal, servers, told)
        finally:
            servers.close()
        tuned.left_out = [*prepared.left_out, *tuned.left_out]
        tried = [settings for trial in journal.trials for settings in (trial.settings, trial.against)]
        names = {_candidate(settings) for settings in (*servers.started, *tried)}
        with atomic.disk_errors(partial):
            atomic.discard(partial / _PROFILES, *(f"{name}.json" for name in names))
            atomic.discard(partial / _CACHES, *names, _MODELS)
        if tuned.profile is not None:
            tuned.profile.write(partial / SHIPPED)
        with atomic.disk_errors(partial):
            document = {**tuned.to_json(), "engine": prepared.search.engine.key(), "loads": journal_key(prepared, options)["loads"]}
            atomic.write_file(partial / "tune.json", json.dumps(document, indent=2, allow_nan=False) + "\n")
            atomic.publish_resumable(partial, output_dir)
    return tuned


def _told(left_out: Sequence[LeftOut]) -> list[str]:
    return [f"{each.switch}{' ' + each.value if each.value else ''} ({each.why})" for each in left_out[:6]]
