"""The console script `gemq`, and `python -m gemq`: an interrupt while the libraries are still loading ends as any other."""

import sys


def main() -> None:
    """Run the command line and exit with its code."""
    try:
        from gemq.cli import run

        code = run()
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted before anything was begun\n  next: run the same command again\n")
        code = 130
    sys.exit(code)


if __name__ == "__main__":
    main()
