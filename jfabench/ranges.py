"""NVTX ranges around phases and cases, so that Nsight tools can select one.

Ranges are push/pop ranges in the NVTX domain `jfabench`. Nsight Compute selects the kernels launched inside one with

    ncu --nvtx --nvtx-include "jfabench@tlx.fwd/" --nvtx-push-pop-scope process ...

(Nsight Compute CLI manual, section NVTX Filtering): `jfabench@` names the domain, and the trailing slash says that the
name is that of a push/pop range, not of a start/end range. Two things are easy to miss:

- Autograd launches the kernels of a backward from a thread of its own, and push/pop ranges belong to the thread that
  pushed them. Without `--nvtx-push-pop-scope process` the filter finds no kernel of a backward.
- The characters `@ , [ ] / * + $ \\` have a meaning in a filter. `range_name` replaces them, so that the names of our
  ranges need no escaping: the range of `tlx/fwd` is called `tlx.fwd`. `include_filter` gives the filter of a name.
"""

from __future__ import annotations

import re
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

DOMAIN = "jfabench"
_DRIVER_FILES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))  # Linux, and Linux inside Windows


class _Range:
    """A push/pop range. It has no state of its own, so one object serves every use of a name, nested ones included."""

    __slots__ = ("_attributes", "_domain")

    def __init__(self, domain: Any, name: str) -> None:
        self._domain = domain
        self._attributes = domain.get_event_attributes(message=name)

    def __enter__(self) -> None:
        self._domain.push_range(self._attributes)

    def __exit__(self, *_: object) -> None:
        self._domain.pop_range()


@cache
def nvtx_range(name: str) -> AbstractContextManager[None]:
    """A context manager that marks what runs inside it as `range_name(name)`.

    It does nothing where the package `nvtx` is missing, or where there is no NVIDIA driver and so no tool to see it.
    """
    if not _driver_present():
        return nullcontext()
    try:
        import nvtx
    except ImportError:
        return nullcontext()
    return _Range(nvtx.get_domain(DOMAIN), range_name(name))


def range_name(name: str) -> str:
    """`name` with `/` turned into `.`, and any other character that a filter would take for syntax into `_`."""
    return re.sub(r"[^\w .:=<>-]", "_", name.replace("/", "."))


def include_filter(name: str) -> str:
    """What `ncu --nvtx-include` needs to select the range that `nvtx_range(name)` opens."""
    return f"{DOMAIN}@{range_name(name)}/"


def _driver_present() -> bool:
    return any(path.exists() for path in _DRIVER_FILES)
