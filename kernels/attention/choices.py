"""Choices of configurations on disk: one small file for each kind of problem, in a folder for each GPU and software.

A file is replaced whole, and is about one kind, so that processes that choose at the same time lose nothing of each
other's work and need no lock. Whatever is wrong with a file or with the folder costs the time to choose again, and no
more.

    <cache>/tuned/<GPU>-<hash of GPU, versions and kernel sources>/<family>-<kernel>-<hash of the kind>.json
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import uuid
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import triton

from .kinds import Kind
from .notice import say_once


def cache_dir() -> Path:
    """``JFABENCH_CACHE_DIR``, else ``jfabench`` in the user's cache directory. Raises RuntimeError without a home."""
    if own := os.environ.get("JFABENCH_CACHE_DIR"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "jfabench"


def load(gpu: str, kind: Kind) -> dict[str, Any] | None:
    """What was saved for this kind, with this software, on a GPU of this name; None if that is nothing readable."""
    try:
        path = _path(gpu, kind)
    except RuntimeError:
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(record, dict) or not _origin(gpu, kind).items() <= record.items():
            raise ValueError("it is not about this kind of problem")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        say_once(f"{path} is ignored, and written anew if possible: {error}")
        return None
    return record


def save(gpu: str, kind: Kind, result: dict[str, Any]) -> None:
    """Keep ``result``, a JSON object, for :func:`load` in this process and later ones; if that fails, say so once."""
    try:
        path = _path(gpu, kind)
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        try:
            draft.write_text(json.dumps({**_origin(gpu, kind), **result}, indent=1) + "\n", encoding="utf-8")
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    except (OSError, RuntimeError) as error:
        say_once(
            "kernel configurations cannot be kept, so that every process chooses them anew (JFABENCH_CACHE_DIR names "
            f"another folder): {error}"
        )


def _path(gpu: str, kind: Kind) -> Path:
    place = f"{re.sub('[^A-Za-z0-9]+', '-', gpu)}-{_digest(_software(gpu))}"
    return cache_dir() / "tuned" / place / f"{kind.family}-{kind.kernel}-{_digest(asdict(kind))}.json"


def _origin(gpu: str, kind: Kind) -> dict[str, Any]:
    return {**_software(gpu), "kind": asdict(kind)}


def _software(gpu: str) -> dict[str, str]:
    """All that the speed of a kernel depends on beside the problem."""
    return {"gpu": gpu, "torch": torch.__version__, "triton": triton.__version__, "kernels": sources_digest()}


@functools.cache
def sources_digest() -> str:
    """Of every module of this package: a change to any of them may change which configuration is best."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return _digest([[path.name, path.read_text(encoding="utf-8")] for path in sources])


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
