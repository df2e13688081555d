"""`gemq package` writes what the arenas ask for, by their own rules, and nothing else; the same inputs give the same bytes."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import small_checkpoint as small
import typer
from typer.testing import CliRunner

from gemq.commands import package as command
from gemq.errors import GemqError, IntegrityError, UsageError
from gemq.quantize.content import directory_digest, files_digest
from gemq.quantize.seal import check_seal, seal_digest
from gemq.serve import efficient_gemma, lowbarena
from gemq.serve import serve as serve_script
from gemq.serve.package import measured_section, read_checkpoint, read_measured

SERVE = Path(serve_script.__file__).resolve().parent
COMMIT = "0123456789abcdef0123456789abcdef01234567"
HUB = ("--repo", "someone/small-w4a16", "--revision", COMMIT)


@pytest.fixture
def e4b(tmp_path: Path) -> Path:
    return small.e4b(tmp_path / "e4b")


@pytest.fixture
def qwen(tmp_path: Path) -> Path:
    return small.qwen(tmp_path / "qwen")


@pytest.fixture(scope="module")
def submission_schema(shared_data: Path) -> Callable[[object], None]:
    """The body of POST /api/submissions as the arena's OpenAPI document has it; calling it validates."""
    path = shared_data.parent / "specs" / "lowbarena-openapi.json"
    document = json.loads(path.read_text())
    body = document["paths"]["/api/submissions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    validator = jsonschema.Draft202012Validator({**body, "components": document["components"]})
    return validator.validate


def run(*arguments: object) -> dict[str, Any]:
    """`gemq package` with --json; raises what it raises."""
    app = typer.Typer()
    app.callback()(lambda: None)
    command.register(app)
    result = CliRunner().invoke(app, ["package", *map(str, arguments), "--json"])
    command.output.mode.json = False
    if result.exception is not None:
        raise result.exception
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def refused(*arguments: object) -> GemqError:
    with pytest.raises(GemqError) as caught:
        run(*arguments)
    return caught.value


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# --- efficient-gemma


def test_the_manifest_keeps_the_harness_rules_and_nothing_is_missing(e4b: Path, tmp_path: Path) -> None:
    made = run(e4b, "--arena", "efficient-gemma", "--output", tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest == made["manifest"]
    assert tuple(manifest) == efficient_gemma.FIELDS
    assert efficient_gemma.problems(manifest, tmp_path / "out") == []
    assert manifest["serve"] == ["python", "serve.py"]
    assert manifest["env"] == {"GEMQ_PROFILE": "single-stream"}
    assert manifest["served_model_name"] == "gemma-4-E4B-it"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["README.md", "manifest.json", "model", "serve.py"]
    assert (tmp_path / "out" / "serve.py").read_bytes() == (SERVE / "serve.py").read_bytes()
    assert check_seal(tmp_path / "out" / manifest["model_id"]) == []


def test_the_same_inputs_give_the_same_bytes(e4b: Path, qwen: Path, tmp_path: Path) -> None:
    elsewhere = shutil.copytree(e4b, tmp_path / "elsewhere" / "e4b")
    run(e4b, "--arena", "efficient-gemma", "--output", tmp_path / "one")
    run(elsewhere, "--arena", "efficient-gemma", "--output", tmp_path / "two", "--copy")
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    run(qwen, "--arena", "lowbarena", *HUB, "--output", tmp_path / "three")
    run(qwen, "--arena", "lowbarena", *HUB, "--output", tmp_path / "four")
    assert contents(tmp_path / "three") == contents(tmp_path / "four")
    assert str(tmp_path) not in str(contents(tmp_path / "one")) + str(contents(tmp_path / "three"))


def test_the_checkpoint_inside_is_a_hard_link_or_a_copy_and_it_is_said_which(e4b: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inode = (e4b / "model.safetensors").stat().st_ino
    assert run(e4b, "--arena", "efficient-gemma", "--output", tmp_path / "a")["checkpoint"] == "inside, hard links"
    assert (tmp_path / "a" / "model" / "model.safetensors").stat().st_ino == inode
    assert run(e4b, "--arena", "efficient-gemma", "--output", tmp_path / "b", "--copy")["checkpoint"] == "inside, copies"
    assert (tmp_path / "b" / "model" / "model.safetensors").stat().st_ino != inode

    def no_link(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr("os.link", no_link)
    assert run(e4b, "--arena", "efficient-gemma", "--output", tmp_path / "c")["checkpoint"] == "inside, copies"
    assert check_seal(tmp_path / "c" / "model") == []


def test_hidden_files_beside_the_checkpoint_stay_out(e4b: Path, tmp_path: Path) -> None:
    (e4b / ".cache").mkdir()
    (e4b / ".cache" / "x").write_text("x")
    run(e4b, "--arena", "efficient-gemma", "--output", tmp_path / "out")
    assert not (tmp_path / "out" / "model" / ".cache").exists()


def test_a_checkpoint_by_hub_id_is_named_at_its_commit(e4b: Path, tmp_path: Path) -> None:
    run(e4b, "--arena", "efficient-gemma", "--output", tmp_path / "out", *HUB)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["model_id"] == "someone/small-w4a16"
    assert manifest["env"]["MODEL_REVISION"] == COMMIT
    assert not (tmp_path / "out" / "model").exists()
    assert efficient_gemma.problems(manifest, tmp_path / "out") == []


@pytest.mark.parametrize(("change", "says"), [
    ({"hidden_size": 1536}, "hidden_size is 1536"), ({"num_hidden_layers": 35}, "num_hidden_layers is 35"),
    ({"architectures": ["Gemma4ForCausalLM"]}, "architecture"), ({"towers": ("vision_tower",)}, "no audio_tower"),
    ({"source": "google/gemma-4-E4B"}, "made from google/gemma-4-E4B"),
])
def test_another_model_is_refused_with_the_reason_unless_forced(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    config = small.e4b_config()
    options = {key: value for key, value in change.items() if key in ("towers", "source")}
    config["architectures"] = change.get("architectures", config["architectures"])
    config["text_config"] |= {key: value for key, value in change.items() if key in config["text_config"]}
    checkpoint = small.write_checkpoint(tmp_path / "other", config, [small.INT4], **options)
    error = refused(checkpoint, "--arena", "efficient-gemma", "--output", tmp_path / "out")
    assert error.exit_code == 2
    assert says in error.message
    assert "--force" in error.next_step
    assert not (tmp_path / "out").exists()
    run(checkpoint, "--arena", "efficient-gemma", "--output", tmp_path / "out", "--force")


def test_a_qat_variant_of_the_arenas_model_is_its_model(tmp_path: Path) -> None:
    run(small.e4b(tmp_path / "qat", source="google/gemma-4-E4B-it-qat-q4_0-unquantized"), "--arena", "efficient-gemma", "--output", tmp_path / "out")


def test_an_output_that_exists_is_left_alone(e4b: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert "exists already" in refused(e4b, "--arena", "efficient-gemma", "--output", tmp_path / "out").message
    assert list((tmp_path / "out").iterdir()) == []


def test_an_output_that_can_not_be_made_is_refused(e4b: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for output in (tmp_path / "file" / "out", tmp_path / "file" / "deeper" / "out", Path("/proc/nowhere/out")):
        error = refused(e4b, "--arena", "efficient-gemma", "--output", output)
        assert error.exit_code == 2
        assert str(output.parent) in error.message


def test_what_fails_half_way_leaves_nothing(e4b: Path, tmp_path: Path) -> None:
    error = refused(e4b, "--arena", "efficient-gemma", "--output", tmp_path / "out", "--dependency", "vllm", "--dependency", "not a requirement")
    assert "dependencies" in error.message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["e4b"]


def test_a_damaged_checkpoint_is_never_packaged(e4b: Path, tmp_path: Path) -> None:
    weights = e4b / "model.safetensors"
    weights.chmod(0o644)
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    error = refused(e4b, "--arena", "efficient-gemma", "--output", tmp_path / "out")
    assert isinstance(error, IntegrityError)
    assert "model.safetensors" in error.message
    assert not (tmp_path / "out").exists()


SOUND: dict[str, Any] = {"name": "n", "description": "d", "dependencies": ["vllm==0.32.0", "vllm[audio]>=0.30,<0.33", "x @ https://a/b.whl"],
                         "model_id": "model", "served_model_name": "m", "port": 8000, "serve": ["python", "serve.py"], "env": {"A": "1"}}


@pytest.mark.parametrize(("field", "value"), [
    ("name", ""), ("name", 3), ("name", "two\nlines"), ("description", None), ("dependencies", "vllm"), ("dependencies", ["-r x.txt"]),
    ("dependencies", ["vllm=0.3"]), ("port", "8000"), ("port", True), ("port", 0), ("port", 65536), ("serve", "python serve.py"), ("serve", []),
    ("serve", ["python", 1]), ("serve", ["python", "other.py"]), ("serve", ["python", "../serve.py"]), ("env", []), ("env", {"A": 1}),
    ("env", {"A B": "1"}), ("env", {"PORT": "1"}), ("model_id", "nowhere"), ("model_id", "../model"), ("model_id", "/etc"), ("model_id", "empty"),
    ("served_model_name", " "),
])
def test_each_broken_rule_of_the_manifest_is_named(field: str, value: object, tmp_path: Path) -> None:
    (tmp_path / "serve.py").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path.parent / "serve.py").write_text("")
    assert efficient_gemma.problems(SOUND, tmp_path) == []
    (problem,) = efficient_gemma.problems({**SOUND, field: value}, tmp_path)
    assert field in problem
    less = {key: kept for key, kept in SOUND.items() if key != field}
    assert efficient_gemma.problems(less, tmp_path) == [f"{field} is missing"]


# --- measured numbers


def measurement(target: object, **more: Any) -> dict[str, Any]:
    value = {"value": 2.0456, "standard_error": 0.01, "upper_95": 2.0712}
    return {"kind": "ppl", "target": str(target), "data": "/somewhere/records.jsonl", "data_sha256": "ab" * 32, "dtype": "float32", "tokens": 61797,
            "records": 128, "ppl": value, "reference": "source", "reference_ppl": {**value, "value": 2.3021}, "ratio": None, "kl_nats": None, **more}


def test_the_readme_has_what_was_measured_and_nothing_else(e4b: Path, tmp_path: Path) -> None:
    run(e4b, "--arena", "efficient-gemma", "--output", tmp_path / "bare")
    bare = (tmp_path / "bare" / "README.md").read_text()
    assert "Nothing was measured" in bare
    (tmp_path / "ppl.json").write_text(json.dumps(measurement(e4b, target_digest=directory_digest(e4b))))
    one_record = {"value": 2.05, "standard_error": None, "upper_95": None}
    (tmp_path / "served.json").write_text(json.dumps(measurement("http://127.0.0.1:8000", ppl=one_record)))
    run(e4b, "--arena", "efficient-gemma", "--output", tmp_path / "out", "--measured", tmp_path / "ppl.json", "--measured", tmp_path / "served.json")
    text = (tmp_path / "out" / "README.md").read_text()
    bound, _, unbound = text.partition("### Unbound")
    assert "| PPL | 2.05 |" in unbound
    assert "| PPL | 2.05 |" not in bound
    assert "| PPL | 2.0456 |" not in unbound
    assert "| PPL | 2.0456 | 2.0712 | 61797 | 128 | records.jsonl (sha256 abababababab…) | locally in float32 |" in text
    assert "| PPL of another reference | 2.3021 | 2.0712 |" in text
    assert "| PPL | 2.05 | – | 61797 | 128 | records.jsonl (sha256 abababababab…) | through the endpoint |" in text
    assert "ratio" not in text
    assert "KL" not in text
    assert "/somewhere" not in text
    assert f"sha256:{seal_digest(e4b)}" in text


@pytest.mark.parametrize("change", [{"kind": "speed"}, {"ppl": {"value": "2"}}, {"ppl": {"value": 2.0}}, {"tokens": None}, {"data_sha256": 3}])
def test_what_is_no_measurement_is_refused(e4b: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "ppl.json"
    path.write_text(json.dumps(measurement(e4b, **change)))
    error = refused(e4b, "--arena", "efficient-gemma", "--output", tmp_path / "out", "--measured", path)
    assert error.exit_code == 2
    assert str(path) in error.message
    for text in ("", "[]", '{"kind": "ppl", "ppl": NaN}', "{"):
        path.write_text(text)
        assert isinstance(refused(e4b, "--arena", "efficient-gemma", "--output", tmp_path / "out", "--measured", path), UsageError)
    assert isinstance(refused(e4b, "--arena", "efficient-gemma", "--output", tmp_path / "out", "--measured", tmp_path / "no.json"), UsageError)


def test_another_checkpoints_numbers_are_refused(e4b: Path, qwen: Path, tmp_path: Path) -> None:
    path = tmp_path / "ppl.json"
    for target in (qwen, e4b, "/nowhere/another"):  # the digest decides, not the path
        path.write_text(json.dumps(measurement(target, target_digest=directory_digest(qwen))))
        error = refused(e4b, "--arena", "efficient-gemma", "--output", tmp_path / "out", "--measured", path)
        assert isinstance(error, UsageError)
        assert "other weights" in error.message
    path.write_text(json.dumps(measurement("/nowhere/another", target_digest=directory_digest(shutil.copytree(e4b, tmp_path / "same-bytes")))))
    run(e4b, "--arena", "efficient-gemma", "--output", tmp_path / "out", "--measured", path)
    assert "Unbound" not in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize("kind", ["ppl", "kl"])
def test_a_ratio_is_to_the_source_only_where_the_reference_is_the_source(qwen: Path, tmp_path: Path, kind: str) -> None:
    """The checkpoint measured against itself has the ratio 1, which says nothing of its source."""
    checkpoint = read_checkpoint(qwen)
    files = {"config.json": "0" * 64, "model.safetensors": "1" * 64, "README.md": "2" * 64}
    made_from = replace(checkpoint, manifest={**checkpoint.manifest, "source": {"model": "source", "revision": None, "files": files}})
    one = {"value": 1.0, "standard_error": 0.0, "upper_95": 1.0}
    text = {}
    for name, digest in (("source", files_digest(files)), ("itself", checkpoint.digest), ("unknown", None)):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(measurement(qwen, kind=kind, target_digest=checkpoint.digest, reference_digest=digest, ratio=one, kl_nats=one)))
        text[name] = measured_section([read_measured(path, made_from)])
    assert "| PPL ratio to the source | 1 |" in text["source"]
    assert "| KL from the source, nats a token | 1 |" in text["source"]
    assert "another reference" not in text["source"].lower()
    for name in ("itself", "unknown"):
        assert "| PPL ratio to another reference | 1 |" in text[name]
        assert "the source |" not in text[name]
        assert "KL from the source" not in text[name]
    assert checkpoint.digest in text["itself"]
    path.write_text(json.dumps(measurement(qwen, target_digest=checkpoint.digest, reference_digest="x`|" * 30, ratio=one)))
    with pytest.raises(UsageError):
        read_measured(path, made_from)


# --- lowbarena


def test_the_submission_is_valid_against_the_arenas_own_document(qwen: Path, tmp_path: Path, submission_schema: Callable[[object], None]) -> None:
    run(qwen, "--arena", "lowbarena", "--output", tmp_path / "out", *HUB)
    body = json.loads((tmp_path / "out" / "submission.json").read_text())
    submission_schema(body)
    assert body["task_id"] == "qwen3-8b"
    assert body["split"] == "dev"
    assert body["artifact"] == {"uri": "someone/small-w4a16", "revision": COMMIT}
    assert body["solution"] == {"method": "gemq-w4a16", "checkpoint": "small-w4a16", "w_a_kv": "W4A16KV16"}
    lowbarena.read_submission(tmp_path / "out")


def test_the_archive_in_the_body_is_the_engine(qwen: Path, tmp_path: Path) -> None:
    plugin = tmp_path / "plugin"
    (plugin / "pkg").mkdir(parents=True)
    (plugin / "pyproject.toml").write_text("[project]\nname = 'p'\n")
    (plugin / "pkg" / "__init__.py").write_text("x = 1\n")
    (plugin / "pkg" / "__pycache__").mkdir()
    (plugin / "pkg" / "__pycache__" / "x.pyc").write_bytes(b"x")
    (plugin / ".git").mkdir()
    (plugin / ".git" / "config").write_text("x")
    run(qwen, "--arena", "lowbarena", "--output", tmp_path / "out", *HUB, "--plugin", plugin, "--profile", "memory")
    packed = base64.b64decode(json.loads((tmp_path / "out" / "submission.json").read_text())["engine"]["inline"])
    with tarfile.open(fileobj=BytesIO(packed), mode="r:gz") as tar:
        members = tar.getmembers()
        held = {member.name: tar.extractfile(member).read() for member in members}  # type: ignore[union-attr]
    assert held == contents(tmp_path / "out" / "engine")
    assert set(held) == {"launch.sh", "profile", "plugin/pyproject.toml", "plugin/pkg/__init__.py"}
    assert held["launch.sh"] == (SERVE / "launch.sh").read_bytes()
    assert held["profile"] == b"memory\n"
    assert {(member.name, member.mode) for member in members if member.mode & 0o111} == {("launch.sh", 0o755)}
    assert {(member.uid, member.gid, member.mtime, member.uname) for member in members} == {(0, 0, 0, "")}
    assert packed[4:8] == bytes(4)  # gzip's own time


def test_an_engine_over_two_megabytes_goes_by_repository(qwen: Path, tmp_path: Path, submission_schema: Callable[[object], None]) -> None:
    import random

    plugin = tmp_path / "plugin"
    plugin.mkdir()
    (plugin / "setup.py").write_text("")
    (plugin / "kernel.bin").write_bytes(random.Random(1).randbytes(2_000_000))
    arguments = (qwen, "--arena", "lowbarena", "--output", tmp_path / "out", *HUB, "--plugin", plugin)
    error = refused(*arguments)
    assert "2000000" in error.message
    assert "--engine-repo" in error.next_step
    assert not (tmp_path / "out").exists()
    run(*arguments, "--engine-repo", "https://github.com/me/engine", "--engine-revision", COMMIT, "--engine-subdir", "qwen3-8b")
    body = json.loads((tmp_path / "out" / "submission.json").read_text())
    submission_schema(body)
    assert body["engine"] == {"uri": "https://github.com/me/engine", "revision": COMMIT, "subdir": "qwen3-8b"}
    assert (tmp_path / "out" / "engine" / "plugin" / "kernel.bin").stat().st_size == 2_000_000


@pytest.mark.parametrize(("schemes", "stated", "kv", "expected"), [
    ([small.INT4, small.INT4], {}, "auto", "W4A16KV16"),
    ([small.INT4, small.INT8], {}, "fp8", "W6A16KV8"),
    ([small.FP8], {}, "auto", "W8A8KV16"),
    ([small.W8A8, small.INT4], {}, "auto", "W6A12KV16"),
    ([small.INT4, small.INT4, None], {}, "auto", "W8A16KV16"),
    ([None], {}, "auto", "W16A16KV16"),
    ([small.INT4, small.INT8, small.INT8], {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "auto", "W6.67A16KV8"),
])
def test_w_a_kv_is_read_from_the_checkpoint(schemes: list[Any], stated: dict[str, Any], kv: str, expected: str, tmp_path: Path) -> None:
    assert lowbarena.w_a_kv(read_checkpoint(small.qwen(tmp_path / "c", schemes, **stated)), kv) == expected


@pytest.mark.slow
def test_w_a_kv_of_the_gptq_format_and_of_a_gemma_leaves_towers_and_tables_out(tmp_path: Path) -> None:
    checkpoint = small.write_checkpoint(tmp_path / "c", small.e4b_config(), [small.INT4])
    assert lowbarena.w_a_kv(read_checkpoint(checkpoint)) == "W4A16KV16"
    from tests.models.gemma3 import build_gemma3_text

    source = build_gemma3_text(tmp_path / "source")
    recipe = tmp_path / "r.yaml"
    rules = "  - match: [decoder]\n    scheme: {weights: {num_bits: 8, strategy: channel}}\n"
    recipe.write_text(f"version: 1\nname: r\nsummary: s\nmethod: rtn\nrules:\n{rules}")
    subprocess.run([sys.executable, "-m", "gemq", "quantize", source, "--recipe", recipe, "--format", "gptq", "--eval-data", "none",
                    "--output", tmp_path / "gptq"], check=True, capture_output=True, timeout=300)  # fmt: skip
    assert lowbarena.w_a_kv(read_checkpoint(tmp_path / "gptq")) == "W8A16KV16"


@pytest.mark.parametrize(("options", "says"), [
    (("--repo", "someone/x", "--revision", "main"), "40 lower-case hex"), (("--repo", "someone/x", "--revision", COMMIT[:12]), "40 lower-case hex"),
    (("--repo", "someone/x", "--revision", COMMIT.upper()), "40 lower-case hex"), (("--repo", "x", "--revision", COMMIT), "OWNER/NAME"),
    (("--repo", "someone/x"), "--revision is not"), (("--revision", COMMIT), "--repo is not"), ((), "at a commit"),
    ((*HUB, "--method", "<b>"), "method"), ((*HUB, "--method", "m" * 61), "method"), ((*HUB, "--name", "n" * 81), "checkpoint"),
    ((*HUB, "--description", "d" * 2001), "notes"), ((*HUB, "--split", "both"), "split"), ((*HUB, "--kv-cache", "int4"), "kv_cache_dtype"),
    ((*HUB, "--profile", "fastest"), "--profile"), ((*HUB, "--engine-repo", "https://x/y"), "--engine-revision is not"),
    ((*HUB, "--engine-repo", "https://x/y", "--engine-revision", "main"), "--engine-revision"), ((*HUB, "--engine-subdir", "x"), "--engine-repo"),
    ((*HUB, "--plugin", "/nowhere"), "--plugin"), ((*HUB, "--copy"), "--copy is for efficient-gemma"),
    ((*HUB, "--dependency", "x"), "--dependency is for efficient-gemma"), ((*HUB, "--task", "qwen3.5-27b"), "Qwen/Qwen3.5-27B"),
    ((*HUB, "--task", "new-task"), "--task is 'new-task'"),
])
def test_what_lowbarena_would_not_take_is_refused(qwen: Path, tmp_path: Path, options: tuple[str, ...], says: str) -> None:
    error = refused(qwen, "--arena", "lowbarena", "--output", tmp_path / "out", *options)
    assert error.exit_code == 2
    assert says in error.message
    assert error.next_step
    assert not (tmp_path / "out").exists()


def test_another_model_or_a_newer_task_needs_force(e4b: Path, qwen: Path, tmp_path: Path) -> None:
    error = refused(e4b, "--arena", "lowbarena", "--output", tmp_path / "out", *HUB)
    assert "Qwen/Qwen3-8B (qwen3-8b)" in error.message
    assert "--task ID --force" in error.next_step
    run(e4b, "--arena", "lowbarena", "--output", tmp_path / "a", *HUB, "--task", "qwen3-8b", "--force")
    run(qwen, "--arena", "lowbarena", "--output", tmp_path / "b", *HUB, "--task", "new-task", "--force")
    assert json.loads((tmp_path / "b" / "submission.json").read_text())["task_id"] == "new-task"


BODY: dict[str, Any] = {
    "task_id": "qwen3-8b", "artifact": {"uri": "a/b", "revision": COMMIT}, "engine": {"inline": "AA=="}, "split": "dev",
    "serving": {"kv_cache_dtype": "auto"}, "solution": {"method": "m", "checkpoint": "c", "w_a_kv": "W4A16KV8"},
    "measure_efficiency": False, "compute_gpu_hours": 0.5,
}  # fmt: skip


@pytest.mark.parametrize(("path", "value"), [
    ("task_id", None), ("task_id", 3), ("artifact.uri", None), ("artifact.revision", 5), ("split", "prod"), ("serving.kv_cache_dtype", "fp4"),
    ("solution.method", "x" * 61), ("solution.method", "a<b"), ("solution.checkpoint", "x" * 81), ("solution.w_a_kv", "W4A16"),
    ("solution.w_a_kv", "w4a16kv8"), ("solution.w_a_kv", "W" + "4" * 30 + "A16KV8"), ("engine.inline", "A" * 2_800_001), ("engine.subdir", "x" * 201),
    ("notes", "x" * 2001), ("compute_gpu_hours", -1.0), ("measure_efficiency", "often"),
])
def test_what_the_arenas_document_refuses_gemq_refuses_too(path: str, value: object, submission_schema: Callable[[object], None]) -> None:
    submission_schema(BODY)
    lowbarena.parse(BODY, "body")
    body: dict[str, Any] = json.loads(json.dumps(BODY))
    *parents, leaf = path.split(".")
    place = body
    for key in parents:
        place = place[key]
    place[leaf] = value
    if value is None:
        del place[leaf]
    with pytest.raises(jsonschema.ValidationError):
        submission_schema(body)
    with pytest.raises(UsageError, match=path.replace(".", r"\.")):
        lowbarena.parse(body, "body")


def test_an_unknown_arena_and_no_checkpoint_are_refused(e4b: Path, tmp_path: Path) -> None:
    assert "efficient-gemma or lowbarena" in refused(e4b, "--arena", "gsm8k", "--output", tmp_path / "out").next_step
    assert "is no directory" in refused(tmp_path / "nowhere", "--arena", "lowbarena", "--output", tmp_path / "out").message
    (tmp_path / "empty").mkdir()
    assert "no config.json" in refused(tmp_path / "empty", "--arena", "lowbarena", "--output", tmp_path / "out").message
