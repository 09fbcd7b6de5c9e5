"""Attention kernels over packed sequences of unequal length.

Importing this package imports neither torch nor triton; they are loaded on the first use of an exported name.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .attention.api import jagged_flash_attention

__all__ = ["jagged_flash_attention"]

_HOME = {"jagged_flash_attention": ".attention.api"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
