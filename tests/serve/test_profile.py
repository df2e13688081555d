"""A tuned profile does what it says wherever it is applied: by serve.py, by launch.sh, in a package; and is refused where it doesn't belong."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import tarfile
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import small_checkpoint as small
from test_package import HUB
from test_package import run as package
from test_scripts import base, both, given, run  # noqa: F401  (base is a fixture)

from gemq.errors import IntegrityError, UsageError
from gemq.quantize.content import directory_digest
from gemq.quantize.seal import seal_digest
from gemq.serve import serve as serve_script
from gemq.serve.profile import Gain, MadeFor, Profile, Speculation, read_profile, require_profile
from gemq.serve.serve import card
from gemq.serve.server import free_port, plan

WORDS = ["--performance-mode", "interactivity", "--compilation-config", '{"cudagraph_mode":"FULL"}', "--cudagraph-capture-sizes", "1", "2"]
GAIN = Gain(workload="single-stream", requests=2, output_tokens=512, in_flight=1, baseline_tps=212.0, tuned_tps=229.0, ratio=1.08,
            lower_bound=1.07, confidence=0.99, pairs=6, confirmed=True, date="2026-11-30")  # fmt: skip


def made(checkpoint: Path | None, **changed: Any) -> Profile:
    seal = seal_digest(checkpoint) if checkpoint is not None else None
    made_for = {"vllm": "0.0", "platform": "cpu", "card": card(True), "checkpoint": seal} | changed.pop("made_for", {})
    variables = {"VLLM_DISABLED_KERNELS": "MacheteLinearKernel", "VLLM_PLUGINS": ""}
    fields: dict[str, Any] = {"base": "memory", "arguments": WORDS, "environment": variables, "measured": GAIN}
    return Profile(**{**fields, "made_for": MadeFor(**made_for), **changed})


@both
def test_it_reaches_the_engine_behind_the_base_and_another_card_is_told(script: str, base: dict[str, str], checkpoint: Path,  # noqa: F811
                                                                         tmp_path: Path) -> None:
    drafter = tmp_path / "draft er"
    drafter.mkdir()
    (drafter / "config.json").write_text("{}")
    profile = made(checkpoint, speculation=Speculation(drafter="draft er", tokens=4), made_for={"card": "NVIDIA H200"})
    profile.write(tmp_path / "mine.json")
    assert read_profile(tmp_path / "mine.json") == profile
    more = {"GEMQ_PROFILE": str(tmp_path / "mine.json"), "GEMQ_EXTRA_ARGS": "--max-num-seqs 3", "FAKE_FAIL": "x", "FAKE_NOTE": str(tmp_path / "note")}
    done = run(script, base | given(script, checkpoint, free_port()) | more)
    assert "mine.json was tuned on NVIDIA H200, and here is" in done.stderr
    told = json.loads((tmp_path / "note").read_text())
    words = told["arguments"]
    at = words.index("--performance-mode")
    assert words[at : at + len(WORDS)] == WORDS
    assert json.loads(words[words.index("--speculative-config") + 1]) == {"model": str(drafter), "num_speculative_tokens": 4}
    # the base's row is in front of it, what the user added behind it
    assert words.index("--max-num-batched-tokens") < at
    assert words[words.index("--max-num-seqs") + 1] == "64"
    assert words[-2:] == ["--max-num-seqs", "3"]
    assert told["environment"]["VLLM_DISABLED_KERNELS"] == "MacheteLinearKernel"
    assert told["environment"]["VLLM_PLUGINS"] == ""
    assert told["environment"]["VLLM_CPU_INT4_W4A8"] == "0"


FOREIGN = [({"vllm": "0.26.0"}, 2, "was made for vLLM 0.26.0 (cpu), and here is 0.0 (cpu)"), ({"platform": "cuda"}, 2, "(cuda)"),
           ({"checkpoint": "0" * 64}, 4, "is another")]  # fmt: skip


@pytest.mark.parametrize(("what", "code", "named"), FOREIGN)
def test_another_vllm_or_checkpoint_is_refused(what: dict[str, str], code: int, named: str, checkpoint: Path,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_script, "installed_vllm", lambda: {"vllm": "0.0+cpu"})
    path = checkpoint.parent / "mine.json"
    assert serve_script.require_made_for(json.loads(made(checkpoint).text()), path, True, checkpoint) is None
    with pytest.raises(serve_script.Refused) as caught:
        serve_script.require_made_for(json.loads(made(checkpoint, made_for=what).text()), path, True, checkpoint)
    assert caught.value.code == code
    assert named in str(caught.value)
    assert "run gemq tune here, or set GEMQ_PROFILE" in str(caught.value)


@pytest.mark.parametrize(("what", "code", "named"), [FOREIGN[0], FOREIGN[2]])
def test_launch_sh_refuses_them_in_the_same_words(what: dict[str, str], code: int, named: str, base: dict[str, str], checkpoint: Path,  # noqa: F811
                                                  tmp_path: Path) -> None:
    made(checkpoint, made_for=what).write(tmp_path / "mine.json")
    done = run("launch.sh", base | given("launch.sh", checkpoint, free_port()) | {"GEMQ_PROFILE": str(tmp_path / "mine.json")})
    assert done.returncode == code, done.stderr
    assert named in done.stderr
    assert "run gemq tune here, or set GEMQ_PROFILE" in done.stderr


def broken(how: str, checkpoint: Path) -> str:
    document = json.loads(made(checkpoint).text())
    if how == "an extra field":
        document["more"] = 1
    elif how == "an argument that is a number":
        document["arguments"][0] = 5
    elif how == "another version":
        document["version"] = 2
    return {"not json": "{", "a list": "[]", "empty": "{}"}.get(how) or json.dumps(document)


@pytest.mark.parametrize("how", ["not json", "a list", "empty", "an extra field", "an argument that is a number", "another version"])
def test_what_is_no_profile_is_refused(how: str, checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    with pytest.raises(serve_script.Refused, match=r"mine\.json.*there is no such file"):
        serve_script.read_tuned(str(path))
    path.write_text(broken(how, checkpoint))
    with pytest.raises(serve_script.Refused, match=r"mine\.json.*write it again with gemq tune"):
        serve_script.read_tuned(str(path))
    with pytest.raises(UsageError, match=r"mine\.json"):
        require_profile(str(path))


def test_launch_sh_refuses_it_without_a_traceback(base: dict[str, str], checkpoint: Path, tmp_path: Path) -> None:  # noqa: F811
    path = tmp_path / "mine.json"
    path.write_text(broken("an argument that is a number", checkpoint))
    for named in ("mine.json", "nowhere.json"):
        done = run("launch.sh", base | given("launch.sh", checkpoint, free_port()) | {"GEMQ_PROFILE": str(tmp_path / named)})
        assert done.returncode == 2, done.stderr
        assert f"{named} can't be read as a profile of gemq tune" in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("field", "value", "named"), [
    ("arguments", ["--enable-prefix-caching"], "--enable-prefix-caching"), ("arguments", ["--language-model-only"], "--language-model-only"),
    ("arguments", ["--max-num-seqs", "4\n5"], "no word"), ("environment", {"VLLM_MARLIN_INPUT_DTYPE": "int8"}, "VLLM_MARLIN_INPUT_DTYPE"),
    ("environment", {"LD_PRELOAD": "x"}, "LD_PRELOAD"), ("environment", {"VLLM_PLUGINS": "a b"}, "VLLM_PLUGINS"), ("base", "fastest", "fastest"),
])  # fmt: skip
def test_a_profile_carries_nothing_but_known_switches(field: str, value: Any, named: str, checkpoint: Path, tmp_path: Path) -> None:
    document = json.loads(made(checkpoint).text()) | {field: value}
    (tmp_path / "mine.json").write_text(json.dumps(document))
    with pytest.raises(UsageError) as caught:
        read_profile(tmp_path / "mine.json")
    assert named in caught.value.message


def test_gemq_serve_takes_it_by_its_path(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(checkpoint).write(tmp_path / "mine.json")
    monkeypatch.chdir(tmp_path)
    profile = require_profile("mine.json")
    launch = plan(checkpoint, python=Path("/x/python"), host="127.0.0.1", port=1, profile=profile)
    assert launch.environment["GEMQ_PROFILE"] == str(tmp_path / "mine.json")
    assert require_profile("memory") == "memory"
    with pytest.raises(UsageError, match="--profile 'fastest' is unknown"):
        require_profile("fastest")


def test_a_package_ships_it_with_its_drafter_and_says_what_it_gained(tmp_path: Path, base: dict[str, str]) -> None:  # noqa: F811
    e4b = small.e4b(tmp_path / "e4b")
    drafter = tmp_path / "drafter-source"
    (drafter / "sub").mkdir(parents=True)
    (drafter / "config.json").write_text("{}")
    (drafter / "sub" / "x").write_text("x")
    profile = made(e4b, made_for={"vllm": "0.32.0"}, speculation=Speculation(drafter=str(drafter), tokens=5))
    profile.write(tmp_path / "mine.json")
    package(e4b, "--arena", "efficient-gemma", "--output", tmp_path / "out", "--profile", tmp_path / "mine.json")
    out = tmp_path / "out"
    assert json.loads((out / "manifest.json").read_text())["env"]["GEMQ_PROFILE"] == "profile.json"
    assert read_profile(out / "profile.json").speculation == Speculation(drafter="drafter", tokens=5)
    assert (out / "drafter" / "sub" / "x").read_text() == "x"
    readme = (out / "README.md").read_text()
    assert "212.00 before, 229.00 after" in readme
    assert "`profile.json`" in readme
    # the package's own copies refuse the stand-in's version: what is shipped is read
    environment = base | given("serve.py", out / "model", free_port()) | {"GEMQ_PROFILE": "profile.json"}
    done = subprocess.run(["python", "serve.py"], cwd=out, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "made for vLLM 0.32.0" in done.stderr


def test_a_package_refuses_a_profile_of_another_checkpoint_or_vllm_or_without_a_measurement(tmp_path: Path) -> None:
    e4b = small.e4b(tmp_path / "e4b")
    path = tmp_path / "mine.json"

    def refused(error: type[Exception], named: str, **changed: Any) -> None:
        made(e4b, **changed).write(path)
        with pytest.raises(error, match=named):
            package(e4b, "--arena", "efficient-gemma", "--output", tmp_path / "out", "--profile", path)
        assert not (tmp_path / "out").exists()

    refused(IntegrityError, "was made for the checkpoint sealed 000000", made_for={"vllm": "0.32.0", "checkpoint": "0" * 64})
    refused(UsageError, r"made for vLLM 0\.26\.0, and the package installs vLLM 0\.32\.0", made_for={"vllm": "0.26.0"})
    refused(UsageError, "was never measured", made_for={"vllm": "0.32.0"}, measured=None)
    refused(UsageError, "there is no checkpoint", made_for={"vllm": "0.32.0"}, speculation=Speculation(drafter="/nowhere", tokens=2))


def test_a_profile_follows_the_content_and_not_seal_or_path(tmp_path: Path) -> None:
    """The same bytes without a seal, or under another card, are what it was made for; other bytes without a seal are not."""
    e4b, path = small.e4b(tmp_path / "e4b"), tmp_path / "mine.json"
    bare = Path(shutil.copytree(e4b, tmp_path / "bare"))
    (bare / "gemq.seal.json").unlink()
    made(None, made_for={"vllm": "0.32.0", "content": directory_digest(bare)}).write(path)
    package(Path(shutil.copytree(bare, tmp_path / "moved")), "--arena", "efficient-gemma", "--output", tmp_path / "out", "--profile", path)
    shard = next(bare.glob("*.safetensors"))
    shard.chmod(0o644)
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(IntegrityError, match="content digest"):
        package(bare, "--arena", "efficient-gemma", "--output", tmp_path / "other", "--profile", path)
    made(e4b, made_for={"vllm": "0.32.0", "checkpoint": "0" * 64, "content": directory_digest(e4b)}).write(path)
    package(e4b, "--arena", "efficient-gemma", "--output", tmp_path / "resealed", "--profile", path)
    assert json.loads((tmp_path / "resealed" / "profile.json").read_text())["made_for"]["checkpoint"] == seal_digest(e4b)


def test_lowbarenas_engine_holds_it_and_takes_no_drafter(tmp_path: Path, base: dict[str, str]) -> None:  # noqa: F811
    qwen = small.qwen(tmp_path / "qwen")
    profile = made(qwen, made_for={"vllm": "0.0"})
    profile.write(tmp_path / "mine.json")
    package(qwen, "--arena", "lowbarena", "--output", tmp_path / "out", *HUB, "--profile", tmp_path / "mine.json")
    body = json.loads((tmp_path / "out" / "submission.json").read_text())
    with tarfile.open(fileobj=BytesIO(base64.b64decode(body["engine"]["inline"])), mode="r:gz") as tar:
        held = {entry.name: tar.extractfile(entry).read() for entry in tar if entry.isfile()}  # type: ignore[union-attr]
    assert held["profile"] == b"profile.json\n"
    assert json.loads(held["profile.json"]) == json.loads(profile.text())
    engine = tmp_path / "out" / "engine"
    environment = base | given("launch.sh", qwen, free_port()) | {"FAKE_NOTE": str(tmp_path / "note"), "FAKE_FAIL": "enough"}
    assert subprocess.run(["bash", engine / "launch.sh", "serve"], env=environment, capture_output=True, timeout=60, cwd=tmp_path).returncode == 1
    told = json.loads((tmp_path / "note").read_text())
    assert [word for word in WORDS if word in told["arguments"]] == WORDS
    made(qwen, speculation=Speculation(drafter=str(qwen), tokens=2)).write(tmp_path / "drafts.json")
    with pytest.raises(UsageError, match="drafts with another"):
        package(qwen, "--arena", "lowbarena", "--output", tmp_path / "two", *HUB, "--profile", tmp_path / "drafts.json")
