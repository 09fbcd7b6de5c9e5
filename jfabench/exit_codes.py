"""What the commands return, and how they say why; the command line's own docstring tells which code is what."""

from __future__ import annotations

import sys

OK, FAILED, USAGE, MACHINE, INTERRUPTED = 0, 1, 2, 3, 130


def fail(message: object, code: int) -> int:
    """Tells people what is wrong, and returns the exit code."""
    print(f"jfabench: {message}", file=sys.stderr)
    return code
