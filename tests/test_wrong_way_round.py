"""What a newcomer gets wrong first: the right diagnosis, and a next step that works."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.models.gemma3 import build_gemma3_text
from tests.quantize.small_jobs import run_job
from typer.testing import CliRunner

from gemq.calibration.sets import require_source
from gemq.cli import app
from gemq.errors import GemqError, IntegrityError, UsageError

INTERRUPTED = """
import sys
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "gemq.cli":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupting())
from gemq.__main__ import main
main()
"""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A source and its checkpoint."""
    folder = tmp_path_factory.mktemp("pair")
    source = build_gemma3_text(folder / "source")
    return source, run_job(source, folder / "checkpoint", "w8a16").directory


def refused(*arguments: object) -> GemqError:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert isinstance(result.exception, GemqError), (arguments, result.output, result.exception)
    return result.exception


def test_an_interrupt_while_the_libraries_load_is_no_traceback():
    ended = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 130
    assert "Traceback" not in ended.stderr
    assert "interrupted" in ended.stderr


def test_a_model_is_not_calibration_data(pair):
    source, _ = pair
    with pytest.raises(UsageError, match="a model's directory"):
        require_source(str(source), 32, source)


def test_verify_of_a_source_says_that_a_source_has_no_seal(pair):
    source, checkpoint = pair
    error = refused("verify", source, "--source", checkpoint)
    assert isinstance(error, IntegrityError)
    assert "source has no seal" in error.next_step


def test_a_sound_checkpoint_is_not_condemned_for_another_source(pair, tmp_path):
    _, checkpoint = pair
    other = build_gemma3_text(tmp_path / "other", seed=5)
    error = refused("verify", checkpoint, "--source", other)
    assert isinstance(error, IntegrityError)
    assert "agrees with its own seal" in error.message
    assert "--source" in error.next_step


def test_a_damaged_checkpoint_is_condemned_even_with_the_right_source(pair, tmp_path):
    source, _ = pair
    damaged = run_job(source, tmp_path / "damaged", "w8a16").directory
    config = damaged / "config.json"
    config.chmod(0o644)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"sliding_window": 8}))
    error = refused("verify", damaged, "--source", source)
    assert isinstance(error, IntegrityError)
    assert "agrees with its own seal" not in error.message


def test_a_checkpoint_s_own_measurements_are_no_new_ones(pair, tmp_path):
    _, checkpoint = pair
    (tmp_path / "measured.json").write_text(json.dumps({"version": 1, "measurements": []}))
    assert "measured.json" in refused("card", checkpoint, "--measured", tmp_path / "measured.json").message


def test_lowbarena_names_its_models_before_it_asks_for_an_upload(pair, tmp_path):
    _, checkpoint = pair
    error = refused("package", checkpoint, "--arena", "lowbarena", "--output", tmp_path / "out")
    assert isinstance(error, UsageError)
    assert "Qwen3" in error.message
