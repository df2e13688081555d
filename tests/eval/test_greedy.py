"""`gemq eval-greedy`: served ids against a checkpoint, a server, or captured records; every way of being another decode is found."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from benchmarks.stub_server import Engine, StubServer
from click.testing import Result
from model_engine import ModelEngine
from small import BOS, VOCABULARY, plain_model, random_records
from typer.testing import CliRunner

from gemq import output
from gemq.commands import bench as commands
from gemq.errors import GemqError, IntegrityError, StoppedSafely, UsageError
from gemq.eval.decoded import DecodeRecord, ids_sha256, read_decoded, write_decoded
from gemq.eval.greedy import first_difference
from gemq.eval.workloads import Prompt

Run = Callable[..., Result]
TOKENS = 10


def untied(source: Path, directory: Path, noise: float) -> Path:
    """The source with an output head of its own and noise: with tied embeddings a random model repeats itself, whatever its weights."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, directory, dirs_exist_ok=True)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = 0.15 * torch.randn(VOCABULARY, 64, generator=torch.Generator().manual_seed(4))
    moved = torch.Generator().manual_seed(5)
    save_file({name: (tensor + noise * torch.randn(tensor.shape, generator=moved)).to(torch.bfloat16) for name, tensor in tensors.items()},
              directory / "model.safetensors", metadata={"format": "pt"})  # fmt: skip
    return directory


@pytest.fixture(scope="module")
def lively(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return untied(source, tmp_path_factory.mktemp("lively"), 0.0)


@pytest.fixture(scope="module")
def other(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return untied(source, tmp_path_factory.mktemp("other"), 0.05)


@pytest.fixture(scope="module")
def model(lively: Path) -> Any:
    return plain_model(lively)


@pytest.fixture
def prompts_file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"id": record["id"], "prompt_token_ids": record["context_token_ids"]}) + "\n" for record in random_records(5)))
    return path


@pytest.fixture
def run() -> Iterator[Run]:
    """Call eval-greedy; a gemq error comes back as `exception`."""
    app = typer.Typer()
    commands.register(app)

    def call(*arguments: object) -> Result:
        output.mode.json = False
        return CliRunner().invoke(app, ["eval-greedy", *(str(argument) for argument in arguments)])

    yield call
    output.mode.json = False


def printed(result: Result) -> dict[str, Any]:
    assert result.exception is None or isinstance(result.exception, GemqError), result.exception
    return json.loads(result.stdout)


def against(run: Run, engine: Engine, reference: object, prompts: Path, *more: object) -> Result:
    with StubServer(engine) as server:
        return run(server.url, "--reference", reference, "--prompts", prompts, "--tokens", TOKENS, "--device", "cpu", "--dtype", "float32", *more)


def test_the_same_checkpoint_is_identical(run: Run, model: Any, lively: Path, prompts_file: Path) -> None:
    document = printed(against(run, ModelEngine(model), lively, prompts_file, "--tolerance", 0, "--json"))
    assert (document["prompts"], document["divergent"], document["identical_share"], document["tokens"]) == (5, 0, 1.0, 5 * TOKENS)


def test_where_and_by_how_much_another_checkpoint_diverges(run: Run, model: Any, lively: Path, other: Path, prompts_file: Path) -> None:
    result = against(run, ModelEngine(plain_model(other)), lively, prompts_file, "--tolerance", 0, "--json")
    assert isinstance(result.exception, IntegrityError)
    assert result.exception.exit_code == 4
    worse = plain_model(other)
    for entry, record in zip(printed(result)["per_prompt"], random_records(5), strict=True):
        # both decode by themselves: the first difference is the divergence, and the margin is the reference's there
        prompt = record["context_token_ids"]
        served, plain = (ModelEngine(one).decode(prompt, TOKENS) for one in (worse, model))
        at = first_difference(served, plain)
        assert entry["divergence"] == at
        if at is not None:
            logits = ModelEngine(model).logits([*prompt, *plain[:at]])[-1]
            assert (entry["served_token"], entry["reference_token"]) == (served[at], plain[at])
            assert entry["margin_nats"] == pytest.approx(float(logits.max() - logits[served[at]]), abs=1e-3)


class Samples(ModelEngine):
    """Draws one token in five."""

    def next_id(self, ids: list[int]) -> int:
        rng = random.Random(str(ids))
        return rng.randrange(4, 260) if rng.random() < 0.2 else super().next_id(ids)


class AddsBos(ModelEngine):
    """Decodes after one more BOS, and tells nobody."""

    def decode(self, ids: list[int], count: int) -> list[int]:
        return super().decode([BOS, *ids], count)


class Stored(ModelEngine):
    """Answers every prompt with what it stored for the first one."""

    stored: list[int] | None = None

    def decode(self, ids: list[int], count: int) -> list[int]:
        self.stored = self.stored or super().decode(ids, count)
        return self.stored


@pytest.mark.parametrize("cheat", [Samples, AddsBos, Stored])
def test_servers_that_decode_otherwise(run: Run, model: Any, lively: Path, prompts_file: Path, cheat: type[ModelEngine]) -> None:
    result = against(run, cheat(model), lively, prompts_file)
    assert isinstance(result.exception, IntegrityError)
    assert "diverge" in result.exception.message


def test_a_server_that_makes_fewer_tokens(run: Run, model: Any, lively: Path, prompts_file: Path) -> None:
    class Short(ModelEngine):
        def decode(self, ids: list[int], count: int) -> list[int]:
            return super().decode(ids, count - 1)

        def usage(self, prompt: list[int], made: list[int], asked: int) -> dict[str, int]:
            return super().usage(prompt, [0] * asked, asked)

    result = against(run, Short(model), lively, prompts_file)
    assert isinstance(result.exception, IntegrityError)
    assert "made 9 tokens, 10 were asked for" in result.exception.message


def test_near_ties_are_told_and_are_no_divergence(run: Run, model: Any, lively: Path, prompts_file: Path) -> None:
    class SecondBest(ModelEngine):
        def decode(self, ids: list[int], count: int) -> list[int]:
            made = super().decode(ids, count)
            best = self.logits([*ids, *made[:-1]])[-1].topk(2).indices.tolist()
            return [*made[:-1], best[1]]

    engine = SecondBest(model)
    gaps = []
    for record in random_records(5):
        ids = record["context_token_ids"]
        best = engine.logits([*ids, *ModelEngine(model).decode(ids, TOKENS)[:-1]])[-1].topk(2).values
        gaps.append(float(best[0] - best[1]))
    between = sorted(gaps)[2] + 1e-4
    document = printed(against(run, engine, lively, prompts_file, "--tolerance", between, "--json"))
    verdicts = [entry["verdict"] for entry in document["per_prompt"]]
    assert verdicts == ["near-ties" if gap <= between else "divergent" for gap in gaps]
    assert document["identical_share"] == 0


def test_what_is_captured_can_be_compared_again(run: Run, model: Any, lively: Path, other: Path, prompts_file: Path, tmp_path: Path) -> None:
    first = against(run, ModelEngine(model), lively, prompts_file, "--output", tmp_path / "one")
    assert first.exception is None
    capture = tmp_path / "one" / "decode.jsonl"
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == ["decode.jsonl", "greedy.json"]
    line = json.loads(capture.read_text().splitlines()[0])
    assert list(line) == ["id", "prompt_sha256", "prompt_token_ids", "completion_token_ids", "completion_token_sha256"]
    assert line["completion_token_sha256"] == hashlib.sha256(",".join(map(str, line["completion_token_ids"])).encode()).hexdigest()
    # records against a checkpoint, an endpoint against records, records against records
    assert run(capture, "--reference", lively, "--device", "cpu", "--tolerance", 0).exception is None
    with StubServer(ModelEngine(model)) as server, StubServer(ModelEngine(plain_model(other))) as worse:
        assert run(server.url, "--reference", capture).exception is None
        assert run(server.url, "--reference", server.url, "--prompts", prompts_file, "--tokens", 4).exception is None
        diverged = run(worse.url, "--reference", capture, "--json")
        assert isinstance(diverged.exception, IntegrityError)
        entry = next(entry for entry in printed(diverged)["per_prompt"] if entry["verdict"] == "divergent")
        assert entry["margin_nats"] > 0  # by the endpoint's own scores
        served = run(worse.url, "--reference", server.url, "--prompts", prompts_file, "--tokens", TOKENS, "--json", "--output", tmp_path / "two")
        assert isinstance(served.exception, IntegrityError)
        by_reference = {entry["id"]: entry for entry in printed(served)["per_prompt"]}[entry["id"]]
        assert (by_reference["divergence"], by_reference["served_token"]) == (entry["divergence"], entry["served_token"])
    both = run(tmp_path / "two" / "decode.jsonl", "--reference", capture, "--json")
    assert printed(both)["divergent"] == printed(served)["divergent"]
    assert run(tmp_path / "two" / "decode.jsonl", "--reference", capture, "--tokens", 1, "--limit", 5).exit_code in (0, 1)


def test_an_endpoint_that_dies_half_way(run: Run, model: Any, lively: Path, prompts_file: Path, tmp_path: Path) -> None:
    asked: list[tuple[int, ...]] = []

    class Counting(ModelEngine):
        def decode(self, ids: list[int], count: int) -> list[int]:
            asked.append(tuple(ids))
            return super().decode(ids, count)

    with StubServer(Counting(model), dies_after=2) as server:
        arguments = [server.url, "--reference", lively, "--prompts", prompts_file, "--tokens", TOKENS, "--device", "cpu",
                     "--output", tmp_path / "out"]  # fmt: skip
        stopped = run(*arguments)
        assert isinstance(stopped.exception, StoppedSafely), stopped.exception
        assert stopped.exception.exit_code == 75
        assert "2 captured records are kept" in stopped.exception.message
        another = run(*arguments[:5], "--tokens", 3, *arguments[7:])
        assert isinstance(another.exception, UsageError)
        another = run(*arguments, "--checkpoint", lively)
        assert isinstance(another.exception, UsageError)
        assert "another comparison" in str(another.exception)
        asked.clear()
        server.dies_after = None
        assert run(*arguments, "--json").exception is None
    assert len(asked) == 3 + 1  # the last kept one is decoded again: a URL may serve another model now
    assert len(read_decoded(tmp_path / "out" / "decode.jsonl")) == 5


def test_another_model_at_the_url_is_not_mixed_in(run: Run, model: Any, lively: Path, prompts_file: Path, tmp_path: Path) -> None:
    class Turning(ModelEngine):
        turned = False

        def decode(self, ids: list[int], count: int) -> list[int]:
            found = super().decode(ids, count)
            return [*found[:-1], (found[-1] + 1) % 300] if self.turned else found

    engine = Turning(model)
    with StubServer(engine, dies_after=2) as server:
        arguments = [server.url, "--reference", lively, "--prompts", prompts_file, "--tokens", TOKENS, "--device", "cpu",
                     "--output", tmp_path / "out"]  # fmt: skip
        assert isinstance(run(*arguments).exception, StoppedSafely)
        server.dies_after, engine.turned = None, True
        refused = run(*arguments).exception
        assert isinstance(refused, IntegrityError)
        assert "the model has changed" in refused.message
        engine.turned = False
        assert run(*arguments).exception is None


def test_made_prompts(run: Run, model: Any, lively: Path) -> None:
    with StubServer(ModelEngine(model)) as server:
        document = printed(run(server.url, "--reference", lively, "--tokens", 4, "--limit", 3, "--device", "cpu", "--json"))
    assert document["prompts"] == 3
    assert document["identical_share"] == 1


# what can't be compared: exit 2


def records(count: int = 2) -> list[DecodeRecord]:
    return [DecodeRecord.of(Prompt(f"p{n}", tokens=(2, 9, n)), [5, 6, 7 + n]) for n in range(count)]


def changed(record: DecodeRecord, **fields: Any) -> str:
    return json.dumps({**json.loads(record.line()), **fields}) + "\n"


@pytest.mark.parametrize(("second", "word"), [
    (changed(records()[1], completion_token_ids=[5, 6, 9]), "line 2: completion_token_sha256"),
    (changed(records()[1], prompt_sha256="abc"), "prompt_sha256"), (changed(records()[1], completion_token_ids=[]), "completion_token_ids"),
    (changed(records()[1], prompt_token_ids=[True]), "prompt_token_ids"), (changed(records()[1], id="p0"), "twice"), ("{}\n", "lacks id"),
    ("nonsense\n", "JSON"), ("[]\n", "object"),
])  # fmt: skip
def test_records_that_were_changed(run: Run, tmp_path: Path, second: str, word: str) -> None:
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    write_decoded(good, records())
    bad.write_text(records()[0].line() + second)
    for arguments in ((good, "--reference", bad), (bad, "--reference", good)):
        error = run(*arguments).exception
        assert isinstance(error, UsageError)
        assert error.exit_code == 2
        assert word in error.message


def test_records_of_other_prompts_or_lengths(run: Run, tmp_path: Path, lively: Path) -> None:
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    write_decoded(one, records())
    for other, word in (
        ([records()[0]], "one side only"),
        ([records()[0], DecodeRecord.of(Prompt("p1", tokens=(2, 9, 8)), [5, 6, 8])], "prompts' token ids differ"),
        ([records()[0], DecodeRecord.of(Prompt("p1", tokens=(2, 9, 1)), [5, 6])], "--tokens"),
    ):
        write_decoded(two, other)
        error = run(one, "--reference", two).exception
        assert isinstance(error, UsageError)
        assert word in error.message + error.next_step
    write_decoded(two, [DecodeRecord.of(Prompt("p", tokens=(2, 9)), [VOCABULARY])])
    beyond = run(two, "--reference", lively, "--device", "cpu").exception
    assert isinstance(beyond, UsageError)
    assert str(VOCABULARY) in str(beyond)


def test_bad_input(run: Run, tmp_path: Path, lively: Path, model: Any, prompts_file: Path) -> None:
    good = tmp_path / "good.jsonl"
    write_decoded(good, records())
    (tmp_path / "empty.jsonl").write_text("")
    with StubServer(ModelEngine(model)) as server:
        for arguments in (
            (good, "--reference", tmp_path / "none.jsonl"), (good, "--reference", tmp_path / "none"), (tmp_path / "none", "--reference", good),
            (good, "--reference", tmp_path), (good, "--reference", good, "--engine", "fast"), (good, "--reference", good, "--tolerance", "nan"),
            (good, "--reference", good, "--tolerance=-1"), (good, "--reference", good, "--prompts", good),
            (good, "--reference", tmp_path / "empty.jsonl"), ("http://127.0.0.1:1", "--reference", good),
            (good, "--reference", good, "--output", tmp_path), (server.url, "--reference", lively, "--prompts", prompts_file, "--tokens", 250),
        ):
            error = run(*arguments).exception
            assert isinstance(error, UsageError), (arguments, error)
            assert error.exit_code == 2
            assert error.next_step


def test_digests_by_hand() -> None:
    assert ids_sha256([1, 22, 3]) == hashlib.sha256(b"1,22,3").hexdigest()
    assert Prompt("a", text="Grüße").sha256 == hashlib.sha256("Grüße".encode()).hexdigest()
    assert DecodeRecord.of(Prompt("a", tokens=(2, 3)), [1]).prompt_sha256 == hashlib.sha256(b"2,3").hexdigest()
    assert [first_difference(*pair) for pair in (([1], [1]), ([1, 2], [1, 3]), ([1], [1, 2]), ([], []))] == [None, 1, 1, None]
