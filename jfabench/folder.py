"""The layout of a result folder, and the two small files beside the records: `run.json` and `ceilings.json`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from jfabench.records import SCHEMA

T = TypeVar("T")


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
    line that says what is timed. `workers` is `per_shape` or `shared`, empty where an older version did not say.
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
    workers: str = ""
    schema: int = SCHEMA

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class ResultFolder:
    root: Path

    @property
    def records(self) -> Path:
        """What a run writes."""
        return self.root / "records.jsonl"

    @property
    def packed(self) -> Path:
        """The records of a run that is over, packed; nothing is ever added to them."""
        return self.root / "records.jsonl.gz"

    @property
    def stored(self) -> Path:
        """The records to read: packed ones where there are no others. It may not exist."""
        return self.packed if self.packed.is_file() and not self.records.exists() else self.records

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
    def environment(self) -> Path:
        return self.root / "environment.json"

    @property
    def charts(self) -> Path:
        return self.root / "charts"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    def read_manifest(self) -> Manifest | None:
        """None if there is none. Raises `ValueError` naming the file and what is wrong with it."""
        return _read(self.manifest, Manifest)

    def read_ceilings(self) -> Ceilings | None:
        """None if there are none. Raises `ValueError` naming the file and what is wrong with it."""
        ceilings = _read(self.ceilings, Ceilings)
        if ceilings is not None and not all(rate > 0 for rate in (ceilings.bytes, *ceilings.flops.values())):
            raise ValueError(f"{self.ceilings}: a rate is not positive; restore the file, or move it away")
        return ceilings


def write_json(path: Path, data: Any) -> None:
    """Writes the whole file or nothing: a reader never sees half of it."""
    write_whole(path, (json.dumps(data, indent=1) + "\n").encode())


def write_whole(path: Path, content: bytes) -> None:
    """Puts a new file in place of an old one at once: a reader never sees half of it. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + f".{os.getpid()}.part")
    try:
        part.write_bytes(content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _read(path: Path, kind: type[T]) -> T | None:
    """The object of class `kind` that `path` holds.

    Keys that this version does not know are ignored where the file says that it has this version's schema (or none).
    """
    if not path.exists():
        return None
    from pydantic import TypeAdapter, ValidationError

    remedy = "restore the file, or move it away"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); {remedy}") from None
    schema = data.get("schema", SCHEMA) if isinstance(data, dict) else SCHEMA
    if isinstance(schema, int) and schema > SCHEMA:
        raise ValueError(f"{path} has schema {schema}, newer than this jfabench reads ({SCHEMA}): update jfabench")
    try:
        return TypeAdapter(kind).validate_python(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        raise ValueError(f"{path} was not written by this jfabench ({where}: {first['msg']}); {remedy}") from None
