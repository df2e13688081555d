"""sdist -> wheel -> clean environment: what the wheel holds, and that the installed command works. Run by `make wheel`."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = {"quantize", "recipes", "calibration", "serve", "eval", "commands"}


def expected_files() -> set[str]:
    """Every module and data file of the source tree, by its name in the wheel."""
    found = set()
    for room in ROOMS:
        folder = ROOT / "src" / "gemq" / room
        patterns = ("*.py", "*.yaml", "launch.sh", "constraints-*.txt", "plugin/pyproject.toml", "plugin/gemq_int4/tuned/*.json")
        found |= {f"gemq/{room}/{path.relative_to(folder).as_posix()}" for pattern in patterns for path in folder.rglob(pattern)}
    found |= {f"gemq/{path.name}" for path in (ROOT / "src" / "gemq").glob("*.py")}
    return found | {"gemq/py.typed"}


def run(*command: object, **options: object) -> str:
    """The output of a command; raises with it where the command fails."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)  # type: ignore[call-overload]
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return str(done.stdout)


def require(holds: bool, what: str) -> None:
    """Stop with `what` unless it holds."""
    if not holds:
        raise SystemExit(what)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        run(sys.executable, "-m", "build", "--outdir", out, cwd=ROOT)  # the wheel is built from the sdist
        (wheel,) = out.glob("*.whl")
        names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
        require(names == expected_files(), f"missing: {sorted(expected_files() - names)}\nunexpected: {sorted(names - expected_files())}")
        run(sys.executable, "-m", "venv", out / "clean")
        python = out / "clean" / "bin" / "python"
        run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", ROOT / "constraints.txt", f"{wheel}[demo]")
        site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=out).strip())
        stray = {"eval", "serve", "quantize", "recipes", "calibration", "tests", "benchmarks"} & {path.name for path in site.iterdir()}
        require(not stray, f"installed at the top level: {sorted(stray)}")
        require("w4a16" in run(out / "clean" / "bin" / "gemq", "recipes", "ls", "--json", cwd=out), "gemq recipes ls does not list w4a16")
        run(out / "clean" / "bin" / "gemq", "quantize", "gemma-3-270m", "--recipe", "w8a16", "--dry-run", cwd=out)
    sys.stdout.write(f"{len(names)} files in the wheel, none at the top level, the command works in a clean environment\n")


if __name__ == "__main__":
    main()
