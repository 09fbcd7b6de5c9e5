"""What is being simulated now: one launch at a time in a process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from triton.language.semantic import TritonSemantic

if TYPE_CHECKING:
    from .machine import Machine

_current: list[Any] = []
semantic: Any = TritonSemantic(None)  # its builder is set when `builder` is imported


class KernelError(Exception):
    """A kernel's source cannot be carried out, and a compiler would not accept it either, or the simulator does not."""


def machine() -> Machine:
    if not _current:
        raise RuntimeError("nothing is being simulated")
    return _current[-1]  # type: ignore[no-any-return]


@contextlib.contextmanager
def running(sim: Machine) -> Iterator[None]:
    if _current:
        raise RuntimeError("a simulation is already running in this process")
    _current.append(sim)
    try:
        yield
    finally:
        _current.pop()
