"""Where in a kernel's source something happens.

A place is taken very often and shown rarely, so it is kept as code objects and line numbers.
"""

from __future__ import annotations

import re
import sys
from types import CodeType
from typing import Any

from .report import Place

_kernel_code: dict[int, CodeType] = {}  # of rewritten functions, by identity: hashing code is slow
DEPTH = 4  # lines of a call chain that are kept

Where = tuple[tuple[CodeType, int], ...]


def register(code: CodeType) -> None:
    """Lines of ``code``, and of functions within it, are lines of a kernel."""
    _kernel_code[id(code)] = code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            register(constant)


def here() -> Where:
    """The kernel's lines that are being executed, innermost first."""
    frame: Any = sys._getframe(1)
    found = []
    while frame is not None:
        code = frame.f_code
        if id(code) in _kernel_code:
            found.append((code, frame.f_lineno))
            if len(found) == DEPTH:
                break
        frame = frame.f_back
    return tuple(found)


def place(where: Any) -> Place:
    return Place(tuple((code.co_filename, line, _shown(code.co_name)) for code, line in where or ()))


def _shown(name: str) -> str:
    """A function's name; the body of a task is a function, too."""
    return re.sub(r"^__(\w+)_\d+$", r"task \1", name)


def of_traceback(traceback: Any) -> Place:
    """The kernel's lines in a traceback, innermost first."""
    found = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if id(code) in _kernel_code:
            found.append((code, traceback.tb_lineno))
        traceback = traceback.tb_next
    return place(tuple(reversed(found[-DEPTH:])))
