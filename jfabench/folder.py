"""The layout of a result folder, and the two small files beside the records: `run.json` and `ceilings.json`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from jfabench.records import SCHEMA


@dataclass(frozen=True)
class Ceilings:
    """The fastest that a device can go: the two lines of its roofline.

    `flops` maps a dtype (`"bf16"`, `"fp16"`) to FLOP/s of a large matrix product, `bytes` is the rate of a large
    copy, read plus written, in bytes/s. `source` is `measured` (by `jfabench ceilings`, on the device that `env`
    describes) or `datasheet` (the vendor's dense figures, named in `note`).
    """

    device: str
    flops: Mapping[str, float]
    bytes: float
    source: Literal["measured", "datasheet"]
    note: str = ""
    when: str = ""
    env: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Manifest:
    """What a run was asked to do. Written once, when it starts; a resumed run must ask for the same.

    `axes` are the dotted names of the parameters that the grid varies, slowest first; `scale` is `full` or `cpu`
    (the small shapes that a sweep file declares for machines without a GPU). `providers` maps each provider to the
    line that says what is timed.
    """

    config: str
    description: str
    operator: str
    baseline: str | None
    device: str
    scale: Literal["full", "cpu"]
    axes: tuple[str, ...]
    providers: Mapping[str, str]
    policy: Mapping[str, Any]
    cases: int
    started: str
    command: str
    version: str
    schema: int = SCHEMA

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Manifest:
        return cls(**{**data, "axes": tuple(data["axes"])})


@dataclass(frozen=True)
class ResultFolder:
    root: Path

    @property
    def records(self) -> Path:
        return self.root / "records.jsonl"

    @property
    def manifest(self) -> Path:
        return self.root / "run.json"

    @property
    def ceilings(self) -> Path:
        return self.root / "ceilings.json"

    @property
    def table(self) -> Path:
        return self.root / "results.csv"

    @property
    def charts(self) -> Path:
        return self.root / "charts"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    def read_manifest(self) -> Manifest | None:
        data = _read_json(self.manifest)
        return None if data is None else Manifest.from_json(data)

    def read_ceilings(self) -> Ceilings | None:
        data = _read_json(self.ceilings)
        return None if data is None else Ceilings(**data)


def write_json(path: Path, data: Any) -> None:
    """Writes the whole file or nothing: a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + f".{os.getpid()}.part")
    part.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def _read_json(path: Path) -> Any:
    if not path.exists():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); delete it or restore it") from None
