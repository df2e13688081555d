"""`gemq eval-ppl` and `gemq eval-kl`: what they print, write, and exit with."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from small import random_records, write_records

from gemq.commands import evaluate
from gemq.errors import OverBudgetError, UsageError

Run = Callable[..., Result]


@pytest.fixture
def run(command_line: Callable[..., Run]) -> Run:
    """Call the commands."""
    return command_line(evaluate)


def on_cpu(command: str, target: Path, data: Path) -> list[object]:
    return [command, target, "--data", data, "--device", "cpu", "--dtype", "float32"]


def printed_json(result: Result) -> dict[str, Any]:
    assert result.exception is None or isinstance(result.exception, OverBudgetError), result.exception
    return json.loads(result.stdout)


def test_ppl_alone(run: Run, source: Path, records_file: Path) -> None:
    result = run(*on_cpu("eval-ppl", source, records_file))
    assert result.exit_code == 0
    assert "PPL" in result.stdout
    assert "reference" not in result.stdout
    document = printed_json(run(*on_cpu("eval-ppl", source, records_file), "--json"))
    assert (document["kind"], document["records"], document["reference"]) == ("ppl", 12, None)
    assert document["ppl"]["standard_error"] > 0
    assert f"{document['ppl']['value']:.5g}" in result.stdout


def test_ppl_with_a_reference_shows_ratio_and_kl(run: Run, source: Path, worse: Path, records_file: Path) -> None:
    arguments = [*on_cpu("eval-ppl", worse, records_file), "--reference", source]
    text = run(*arguments).stdout
    for word in ("reference PPL", "ratio", "KL, nats/token", "95% upper bound", "with 95% confidence"):
        assert word in text
    document = printed_json(run(*arguments, "--json"))
    assert document["kl_nats"]["value"] > 0
    assert document["ratio"]["upper_95"] > document["ratio"]["value"]
    assert printed_json(run(*arguments, "--json", "--no-kl"))["kl_nats"] is None


def test_the_budget_binds_on_the_upper_bound(run: Run, source: Path, worse: Path, records_file: Path) -> None:
    arguments = [*on_cpu("eval-ppl", worse, records_file), "--reference", source, "--no-kl", "--json"]
    ratio = printed_json(run(*arguments))["ratio"]
    between = (max(ratio["value"], 1.0) + ratio["upper_95"]) / 2 - 1  # the value is inside this budget, the bound is not
    assert 0 < between < 1
    over = run(*arguments, "--budget", f"{between:.6f}")
    assert isinstance(over.exception, OverBudgetError)
    assert over.exception.exit_code == 3
    assert printed_json(over)["ratio"] == ratio  # printed before the verdict
    assert run(*arguments, "--budget", f"{100 * (ratio['upper_95'] - 1) + 0.01:.6f}%").exit_code == 0


def test_the_kl_budget_binds_on_the_upper_bound(run: Run, source: Path, worse: Path, records_file: Path) -> None:
    arguments = [*on_cpu("eval-kl", worse, records_file), "--reference", source, "--json"]
    kl = printed_json(run(*arguments))["kl_nats"]
    over = run(*arguments, "--budget", (kl["value"] + kl["upper_95"]) / 2)
    assert isinstance(over.exception, OverBudgetError)
    assert printed_json(over)["kl_nats"] == kl
    assert run(*arguments, "--budget", kl["upper_95"] * 1.001).exit_code == 0
    assert "KL, nats/token" in run(*arguments[:-1]).stdout


@pytest.mark.parametrize("budget", ["0", "0%", "-5%", "-0.1", "101%", "5", "nan", "inf", "5%%", "five", ""])
def test_a_ppl_budget_that_is_no_share(run: Run, source: Path, records_file: Path, budget: str) -> None:
    error = run("eval-ppl", source, "--data", records_file, "--reference", source, f"--budget={budget}").exception
    assert isinstance(error, UsageError)
    assert error.exit_code == 2
    assert "--budget" in str(error)


@pytest.mark.parametrize("budget", ["0", "-0.1", "nan", "inf", "5%", "x"])
def test_a_kl_budget_that_is_no_number(run: Run, source: Path, records_file: Path, budget: str) -> None:
    assert isinstance(run("eval-kl", source, "--data", records_file, "--reference", source, f"--budget={budget}").exception, UsageError)


def test_shares() -> None:
    assert evaluate.parse_share("5%") == pytest.approx(0.05)
    assert evaluate.parse_share(" 0.05 ") == 0.05
    assert evaluate.parse_share("100%") == 1.0


def test_a_budget_needs_a_reference_and_two_records(run: Run, source: Path, records_file: Path, tmp_path: Path) -> None:
    assert "--reference" in str(run("eval-ppl", source, "--data", records_file, "--budget", "5%").exception)
    one = [*on_cpu("eval-ppl", source, records_file), "--reference", source, "--budget", "5%", "--records", 1]
    assert "single record" in str(run(*one).exception)
    alone = write_records(tmp_path / "one.jsonl", random_records(1))
    result = run(*on_cpu("eval-ppl", source, alone), "--reference", source, "--budget", "5%")
    assert isinstance(result.exception, UsageError)
    assert "single record" in str(result.exception)


def test_output_is_written_whole_and_never_over_another(run: Run, source: Path, records_file: Path, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    arguments = [*on_cpu("eval-ppl", source, records_file), "--json", "--output", file]
    printed = printed_json(run(*arguments))
    assert json.loads(file.read_text()) == printed
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]
    assert "exists already" in str(run(*arguments).exception)
    assert "does not exist" in str(run(*arguments[:-1], tmp_path / "none" / "r.json").exception)


def test_windows_and_skip(run: Run, source: Path, text_file: Path) -> None:
    document = printed_json(run(*on_cpu("eval-ppl", source, text_file), "--json", "--length", 32, "--windows", 3, "--skip", 2))
    assert [record["id"] for record in document["per_record"]] == ["window-2", "window-3", "window-4"]


def test_the_command_file_imports_no_torch() -> None:
    code = "import sys, gemq.commands.evaluate; sys.exit('torch' in sys.modules or 'transformers' in sys.modules or 'scipy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
