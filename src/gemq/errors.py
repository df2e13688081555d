"""Every failure that gemq foresees: one sentence, the next step, an exit code.

A command raises one of these; `cli` prints it through `output` and exits with its code. Anything else that escapes is a bug of gemq's
and exits 1 with a traceback.
"""

from __future__ import annotations

import re

_LONGEST = 1000


class GemqError(Exception):
    """A failure with its reason and what to do next.

    `message` names the thing, the value it had and what is valid; `next_step` is what the user can type or change.
    """

    exit_code = 1

    def __init__(self, message: str, next_step: str = "") -> None:
        self.message = one_line(message)
        super().__init__(self.message)
        self.next_step = one_line(next_step)


def one_line(text: str) -> str:
    """`text` as a terminal and a log can take it, whatever a stranger's file put into it: one line, printable, 1000 characters at most."""
    text = re.sub(r"\s*[\r\n]\s*", " ", text)
    if not text.isprintable():
        text = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


class UsageError(GemqError):
    """The command line, a recipe, a data file or a source can't be used as given (exit 2)."""

    exit_code = 2


class OverBudgetError(GemqError):
    """The result is complete and was measured, and is worse than the budget allows (exit 3)."""

    exit_code = 3


class IntegrityError(GemqError):
    """Bytes or behaviour differ from what was recorded or promised (exit 4)."""

    exit_code = 4


class StoppedSafely(GemqError):
    """The work stopped before its end and can go on where it was: same command again (exit 75, EX_TEMPFAIL)."""

    exit_code = 75


class Interrupted(StoppedSafely):
    """Ctrl-C or SIGTERM; what was finished is kept (exit 130)."""

    exit_code = 130
