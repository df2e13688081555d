"""Both arenas' packages on the real vLLM, judged by a harness of their own: unprivileged, from a read-only folder, PPL as measured here.

Three starts: Efficient Gemma's package with Gemma 3 270M in the gptq format, LowBArena's with that in compressed-tensors and with the small
trained Gemma 4 in the gptq format (test_vllm.py has Gemma 4 in compressed-tensors).
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import pytest
from fake_vllm import alive, wait_until
from recipe_texts import INT4, INT4_AND_INT8

from gemq.eval.ppl import evaluate_ppl
from gemq.serve.watchdog import descendants

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]
ROOT = Path(__file__).resolve().parent.parent.parent
TINY = ROOT / "tests" / "models" / "gemma4-tiny"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGEST_DIFFERENCE = 0.005
RECIPES = {"gemma4": INT4_AND_INT8, "gemma3": INT4}
CASES = [("lowbarena", "gemma4", "gptq"), ("efficient-gemma", "gemma3", "gptq"), ("lowbarena", "gemma3", "compressed-tensors")]


@dataclass
class Judged:
    """A package that runs, its checkpoint, and the token records that it is asked about."""

    judge: harness.Judge
    folder: Path
    checkpoint: Path
    records: list[dict[str, Any]]
    data: Path


def wikitext_records(folder: Path, data: Path) -> list[dict[str, Any]]:
    """12 windows of BOS and 199 tokens from the middle of wikitext-2's test text, in the small Gemma 4's vocabulary."""
    from tokenizers import Tokenizer

    text = (data / "wikitext2-test.txt").read_text(encoding="utf-8")
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text[400_000:440_000], add_special_tokens=False).ids
    return [{"id": str(start), "context_token_ids": [2], "target_token_ids": ids[start : start + 199]} for start in range(0, 12 * 199, 199)]


def ground_truth_records(data: Path) -> list[dict[str, Any]]:
    """The first 6 records of the arena's own file that leave targets within 400 tokens, cut there."""
    with open(data / "ppl_ground_truth_tokens.jsonl", encoding="utf-8") as file:
        records = [json.loads(line) for line in itertools.islice(file, 40)]
    short = [record for record in records if len(record["context_token_ids"]) < 250]
    return [{**{key: record[key] for key in ("id", "context_token_ids")},
             "target_token_ids": record["target_token_ids"][: 400 - len(record["context_token_ids"])]} for record in short[:6]]  # fmt: skip


def with_chat_template(model: Path, folder: Path) -> Path:
    """`model`, a base model that has no chat template, with the small Gemma 4's: the harness asks for chat."""
    folder.mkdir()
    for path in model.iterdir():
        (folder / path.name).symlink_to(path)
    shutil.copy(TINY / "chat_template.jinja", folder)
    return folder


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(case))
def judged(request: pytest.FixtureRequest, vllm_python: Path, shared_data: Path, gemq: Callable[..., None],
           tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judged]:  # fmt: skip
    arena, model, form = request.param
    work = tmp_path_factory.mktemp("judged")
    source = TINY if model == "gemma4" else with_chat_template(request.getfixturevalue("demo_model"), work / "source")
    (work / "recipe.yaml").write_text(RECIPES[model])
    checkpoint, package = work / "checkpoint", work / "package"
    gemq("quantize", source, "--recipe", work / "recipe.yaml", "--format", form, "--output", checkpoint, "--eval-data", "none")
    hub = ["--repo", "someone/small", "--revision", COMMIT, "--task", "qwen3-8b"] if arena == "lowbarena" else []
    gemq("package", checkpoint, "--arena", arena, "--output", package, "--force", *hub)
    records = wikitext_records(source, shared_data) if model == "gemma4" else ground_truth_records(shared_data)
    data = work / "records.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    folders = [harness.sealed_off(package)]
    if arena == "lowbarena":
        folders.append(harness.sealed_off(checkpoint))
        judge = harness.lowbarena(folders[0], folders[1], vllm_python, work / "log")
    else:
        judge = harness.efficient_gemma(folders[0], vllm_python, work / "log")
    try:
        judge.wait()
        yield Judged(judge, folders[0], checkpoint, records, data)
    finally:
        judge.end()
        for folder in {*folders, judge.folder}:
            shutil.rmtree(folder.parent)


def test_a_package_passes_the_harness_and_scores_what_is_measured_here(judged: Judged) -> None:
    judge = judged.judge
    assert judge.uid() == harness.demoted_uid()
    assert harness.chats(judge, ["one two three", "what is this"], 16) > 0
    prompts = [record["context_token_ids"] + record["target_token_ids"][:20] for record in judged.records[:3]]
    first, second = harness.capture(judge, prompts, 24), harness.capture(judge, prompts, 24)
    assert first == second
    served = harness.perplexity(judge, judged.records)
    local = evaluate_ppl(str(judged.checkpoint), judged.data, dtype="float32").ppl.value
    assert served == pytest.approx(local, rel=LARGEST_DIFFERENCE)
    processes = [judge.process.pid, *descendants(judge.process.pid)]
    judge.end()
    wait_until(lambda: not any(alive(pid) for pid in processes), 30, "no process is left")
