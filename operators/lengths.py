"""How long the sequences of a batch are: a small family of seeded generators, lists and files.

A spec is an object whose `kind` says which, as in a sweep file:

    {kind: fill, max_len: 1024, fill: 0.5}                       {kind: constant, length: 512}
    {kind: lognormal, median: 200, sigma: 1.0, max_len: 4096}    {kind: zipf, exponent: 1.2, max_len: 4096}
    {kind: list, values: [3, 0, 17]}                             {kind: file, path: lengths.csv, column: tokens}

The generators never draw 0 by themselves; `empty` makes that share of their sequences empty. The same spec, batch and
seed always give the same lengths.
"""

from __future__ import annotations

import csv
import difflib
import functools
import hashlib
import importlib
import io
import math
import numbers
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, model_validator

Lengths: TypeAlias = npt.NDArray[np.int64]
"""`[B]` rows per sequence."""

MAX_ROWS = 2**31 - 1
"""Offsets are int32, so neither one sequence nor a batch may have more rows."""

Rows = Annotated[int, Field(ge=1, le=MAX_ROWS)]


class _Generated(BaseModel):
    """Lengths that are drawn. Subclasses say from which distribution; all share the share of empty sequences."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    empty: float = Field(0.0, ge=0, le=1, description="share of the sequences made empty, at random places")

    @property
    def count(self) -> int | None:
        """The number of sequences that the spec itself fixes; None: any."""
        return None

    @property
    def may_be_empty(self) -> bool:
        return self.empty > 0

    def draw(self, batch: int, rng: np.random.Generator) -> Lengths:
        lengths = self._draw(batch, rng)
        lengths[rng.permutation(batch)[: round(self.empty * batch)]] = 0
        return lengths

    def _draw(self, batch: int, rng: np.random.Generator) -> Lengths:
        raise NotImplementedError

    def __str__(self) -> str:
        return self._label() + (f" empty={self.empty:g}" if self.empty else "")

    def _label(self) -> str:
        raise NotImplementedError


class FillLengths(_Generated):
    """The published jagged-attention benchmark's generator, whose parameter is called sparsity there.

    It is a fill ratio: 1 means that every length is `max_len`, 0.9 spans 0.8 to 1 times `max_len`, 0.5 spans 1 to
    `max_len`, 0.1 is short and uneven (1 to 0.2 times `max_len`). Below 1, `max_len` itself is never drawn.
    """

    kind: Literal["fill"]
    max_len: Rows
    fill: float = Field(gt=0, le=1)

    def _draw(self, batch: int, rng: np.random.Generator) -> Lengths:
        if self.fill == 1:
            return np.full(batch, self.max_len, np.int64)
        if self.fill >= 0.5:
            low, high = max(1, int((2 * self.fill - 1) * self.max_len)), self.max_len
        else:
            low, high = 1, max(2, int(2 * self.fill * self.max_len))
        return rng.integers(low, max(low + 1, high), batch, dtype=np.int64)

    def _label(self) -> str:
        return f"N={self.max_len} fill={self.fill:g}"


class ConstantLengths(_Generated):
    """Every sequence has the same length: dense attention."""

    kind: Literal["constant"]
    length: int = Field(ge=0, le=MAX_ROWS)

    @property
    def may_be_empty(self) -> bool:
        return self.length == 0 or super().may_be_empty

    def _draw(self, batch: int, rng: np.random.Generator) -> Lengths:
        return np.full(batch, self.length, np.int64)

    def _label(self) -> str:
        return f"N={self.length}"


class LognormalLengths(_Generated):
    """Rounded lognormal lengths, clipped to `[1, max_len]`: most of real traffic looks like this.

    Give the median, or the mean (of the distribution before it is clipped: mean = median * exp(sigma^2 / 2)).
    """

    kind: Literal["lognormal"]
    median: float | None = Field(None, gt=0)
    mean: float | None = Field(None, gt=0)
    sigma: float = Field(gt=0, le=10, description="standard deviation of the logarithm of the length")
    max_len: Rows

    @model_validator(mode="after")
    def _one_location(self) -> LognormalLengths:
        if (self.median is None) == (self.mean is None):
            raise ValueError("give exactly one of `median` and `mean`")
        return self

    def _draw(self, batch: int, rng: np.random.Generator) -> Lengths:
        mu = math.log(self.median) if self.median is not None else math.log(self.mean or 0) - self.sigma**2 / 2
        drawn = np.minimum(rng.lognormal(mu, self.sigma, batch), self.max_len)  # clip first: exp may overflow int64
        return np.maximum(np.rint(drawn), 1).astype(np.int64)

    def _label(self) -> str:
        location = f"median={self.median:g}" if self.median is not None else f"mean={self.mean:g}"
        return f"N={self.max_len} lognormal({location} sigma={self.sigma:g})"


class ZipfLengths(_Generated):
    """`P(n)` proportional to `n ** -exponent` for `n` in `1..max_len`: very many short ones, few long ones."""

    kind: Literal["zipf"]
    exponent: float = Field(gt=0, le=20)
    max_len: int = Field(ge=1, le=2**24)

    def _draw(self, batch: int, rng: np.random.Generator) -> Lengths:
        weights = np.arange(1, self.max_len + 1, dtype=np.float64) ** -self.exponent
        cumulative: npt.NDArray[np.float64] = np.cumsum(weights)
        drawn: Lengths = np.searchsorted(cumulative, rng.random(batch) * cumulative[-1], side="right")
        return np.clip(drawn + 1, 1, self.max_len).astype(np.int64)

    def _label(self) -> str:
        return f"N={self.max_len} zipf({self.exponent:g})"


class _Explicit(BaseModel):
    """Lengths that are given, in their order; the seed changes nothing."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def all_lengths(self) -> Lengths:
        raise NotImplementedError

    @property
    def count(self) -> int | None:
        return len(self.all_lengths())

    @property
    def may_be_empty(self) -> bool:
        return bool((self.all_lengths() == 0).any())

    def draw(self, batch: int, rng: np.random.Generator) -> Lengths:
        lengths = self.all_lengths()
        if batch != len(lengths):
            raise ValueError(f"the lengths are {len(lengths)}, the batch is {batch}")
        return lengths.copy()


class ListLengths(_Explicit):
    kind: Literal["list"]
    values: tuple[int, ...] = Field(min_length=1)

    @model_validator(mode="before")
    @classmethod
    def _whole_numbers(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("values"), list | tuple):
            whole = _checked(data["values"], "values", first=0, unit="entry")
            return {**data, "values": tuple(whole.tolist())}
        return data

    def all_lengths(self) -> Lengths:
        return np.asarray(self.values, np.int64)

    def __str__(self) -> str:
        return f"list({len(self.values)}) N={max(self.values)}"


class FileLengths(_Explicit):
    """One column of a CSV or Parquet file, one length a row.

    `digest` is the SHA-256 of the file; it is filled in when the spec is validated, so that whatever stores the spec
    names the file's content, and a spec that carries one refuses a file that has changed.
    """

    kind: Literal["file"]
    path: str = Field(min_length=1)
    column: str | None = Field(None, description="may be left out if the file has only one")
    digest: str | None = Field(None, pattern="^[0-9a-f]{64}$", description="filled in")

    @model_validator(mode="after")
    def _read(self) -> FileLengths:
        path = Path(self.path)
        try:
            found = hashlib.sha256(path.read_bytes()).hexdigest()
        except FileNotFoundError:
            raise ValueError(f"there is no file {self.path!r} (looked in {Path.cwd()})") from None
        except OSError as error:
            raise ValueError(f"cannot read {self.path!r}: {error.strerror}") from None
        if self.digest is not None and self.digest != found:
            raise ValueError(
                f"{self.path!r} has changed: its SHA-256 is {found}, the spec says {self.digest}; "
                "restore the file, or remove `digest` to accept the new content"
            )
        object.__setattr__(self, "digest", found)
        self.all_lengths()
        return self

    def all_lengths(self) -> Lengths:
        return _read_lengths(self.path, self.column, self.digest or "")

    def __str__(self) -> str:
        lengths = self.all_lengths()
        return f"{Path(self.path).name}({len(lengths)}) N={lengths.max()}"


LengthsSpec = Annotated[
    FillLengths | ConstantLengths | LognormalLengths | ZipfLengths | ListLengths | FileLengths,
    Field(discriminator="kind"),
]


def draw(spec: LengthsSpec, batch: int, seed: int, stream: int = 0) -> Lengths:
    """The lengths of `batch` sequences, `[batch]` int64. `stream` separates independent draws with one seed.

    Raises `ValueError` if `spec` lists another number of lengths than `batch`.
    """
    return spec.draw(batch, np.random.default_rng([seed, stream]))


def lengths_hash(lengths: npt.ArrayLike) -> str:
    """16 hexadecimal digits of the SHA-256 of the lengths as little-endian int64."""
    return hashlib.sha256(np.asarray(lengths).astype("<i8").tobytes()).hexdigest()[:16]


@functools.lru_cache(maxsize=16)
def _read_lengths(path: str, column: str | None, digest: str) -> Lengths:
    """`digest` is part of the key only: a file that changed is read again."""
    table = _read_parquet(path) if path.lower().endswith((".parquet", ".pq")) else _read_csv(path)
    if not table:
        raise ValueError(f"{path!r} has no columns: expected one length a row")
    if column is None:
        if len(table) > 1:
            raise ValueError(f"{path!r} has the columns {', '.join(table)}: name one as `column`")
        column = next(iter(table))
    if column not in table:
        near = difflib.get_close_matches(column, table, n=1, cutoff=0.3)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{path!r} has no column {column!r}, only {', '.join(table)}{hint}")
    first, values = table[column]
    if not len(values):
        raise ValueError(f"{path!r} holds no lengths")
    lengths = _checked(values, f"{path!r}, column {column!r}", first=first, unit="row")
    lengths.flags.writeable = False
    return lengths


Table: TypeAlias = dict[str, tuple[int, Sequence[Any]]]
"""Column name -> (number of its first row as an editor shows it, values)."""


def _read_csv(path: str) -> Table:
    """A file whose first line is a number has no header; its one column is then called `length`."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{path!r} is not text: expected CSV, or Parquet in a file named *.parquet") from None
    rows = list(csv.reader(io.StringIO(text)))
    while rows and not any(cell.strip() for cell in rows[-1]):
        rows.pop()
    if not rows:
        return {}
    header, first = [cell.strip() for cell in rows[0]], 2
    if _is_number(header[0]):
        header, first = [f"column {i + 1}" for i in range(len(header))] if len(header) > 1 else ["length"], 1
    body = rows[first - 1 :]
    return {name: (first, [row[i] if i < len(row) else "" for row in body]) for i, name in enumerate(header)}


def _read_parquet(path: str) -> Table:
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise ValueError(f"reading {path!r} needs pyarrow: pip install 'jfabench[parquet]', or use CSV") from None
    try:
        table = parquet.read_table(path)
    except Exception as error:
        raise ValueError(f"{path!r} is not a readable Parquet file: {error}") from None
    return {name: (0, table.column(name).to_pylist()) for name in table.column_names}


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _checked(values: Iterable[Any], where: str, first: int, unit: str) -> Lengths:
    """`[n]` int64 of `values`; `ValueError` names the first one that is no length, counting `unit`s from `first`."""
    lengths = []
    for number, value in enumerate(values, start=first):
        try:
            lengths.append(_length(value))
        except ValueError as error:
            raise ValueError(f"{where}, {unit} {number}: {error}") from None
    return np.asarray(lengths, np.int64)


def _length(value: Any) -> int:
    if isinstance(value, str):
        text = value.strip()
        value = int(text) if text.removeprefix("-").isdecimal() else float(text) if _is_number(text) else text or None
    if value is None or (isinstance(value, numbers.Real) and math.isnan(value)):
        raise ValueError("the length is missing")
    if isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral) and float(value).is_integer():
        value = int(float(value))  # pandas writes whole numbers of a column with a gap as floats
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ValueError(f"{value!r} is not a whole number of rows")
    length = int(value)
    if not 0 <= length <= MAX_ROWS:
        raise ValueError(f"{length} is not a length: expected 0 to {MAX_ROWS}")
    return length
