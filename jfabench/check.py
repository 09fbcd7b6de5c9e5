"""Is a result right? Comparing tensors with the oracle's, and making sure that unwritten memory does not look right.

One limit for a whole tensor would be set by its largest values: attention over three keys has values, and errors, fifty
times those over four thousand, and hides whatever goes wrong there. So the vectors of a result (its last dimension: one
row, one head) are sorted into classes, once by the length of their sequence and once by their own size, and each class
is held against the error that plain PyTorch makes in that same class.

Importing this module imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from jfabench.records import TensorCheck, finite_or_none

CHUNK = 2**26
"""Elements compared at a time: a few hundred MiB of float32 temporaries, whatever the size of the tensors."""

MARGIN = 2.0
"""How many times the baseline's largest error a result may have: the practice of flash-attention's own tests."""

CLASS_MARGIN = 4.0
"""The same in one class: there, more often than in a whole tensor, the largest error is that of one unlucky vector."""

NORM_MARGIN = 1.5
"""How many times the norm of the baseline's errors. Norms of many errors hardly vary: right kernels are within 1.1."""

MAX_CHANCE, NORM_CHANCE = 16.0, 4.0
"""Over the square root of the weight, added to the margins: a few errors vary more than many."""

SMALLEST_CLASS = 256.0
"""The least weight of a class that is judged by itself; a lighter one joins its neighbour."""

COLUMNS = 32
"""Classes by length, and as many by size. By length: 0 and 1, 2, 3 and 4, 5 to 8, ... By size: see `LOWEST_SIZE`."""

LOWEST_SIZE = -16
"""Vectors whose largest value is below two to this power are one class; each factor of two above is another."""


@dataclass(frozen=True, eq=False)
class Rows:
    """What the rows of a result (its first dimension) have to do with sequences.

    `length_class` is `[rows]` (see `length_classes`), None where rows belong to no sequence. `weight`, `[rows]` float32
    or one number for all, says how many independent roundings stand behind a vector's error: more vectors than that
    make no class any less a matter of chance. `vanishing` is the size below which a vector is 0 but for cancellation
    noise: there an absolute error is allowed.
    """

    length_class: Tensor | None
    weight: Tensor | float = 1.0
    vanishing: float = 0.0

    def at(self, chosen: slice | Tensor) -> Rows:
        length = None if self.length_class is None else self.length_class[chosen]
        weight = self.weight[chosen] if isinstance(self.weight, Tensor) else self.weight
        return Rows(length, weight, self.vanishing)


Counted: TypeAlias = dict[str, npt.NDArray[np.float64]]


def length_classes(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """`ceil(log2(length))`: 0 for lengths 0 and 1, 1 for 2, 2 for 3 and 4, 12 for 2049 to 4096."""
    _, exponent = np.frexp(np.maximum(lengths - 1, 0).astype(np.float64))
    return exponent.astype(np.int64)


class Tally:
    """The errors of a result in every class, `[COLUMNS]` by length, then as many by size, summed up block by block.

    A relative error is a vector's largest error over its largest value. `values`, `vanishing` and `not comparable` are
    numbers of values. All stays on the device until `host` is called.
    """

    MOST = ("error", "value", "relative error")
    SUMS = ("squared errors", "squares", "weight", "values", "vanishing", "not comparable")

    def __init__(self, device: torch.device) -> None:
        self.most = torch.zeros((len(self.MOST), 2 * COLUMNS), dtype=torch.float64, device=device)
        self.sums = torch.zeros((len(self.SUMS), 2 * COLUMNS), dtype=torch.float64, device=device)

    def add(self, got: Tensor, expected: Tensor, rows: Rows) -> None:
        """Counts in `[rows, heads, D]` blocks, or any other shape whose first dimension is that of `rows`."""
        for chunk in _chunks(expected):
            self._add(got[chunk], expected[chunk], rows.at(chunk))

    def _add(self, got: Tensor, expected: Tensor, rows: Rows) -> None:
        difference = _difference(got, expected)
        bad = ~difference.isfinite()
        difference.masked_fill_(bad, 0.0)
        values = expected.abs().nan_to_num_(0.0, 0.0, 0.0)
        # A vector's size is its largest value, which unlike a norm depends on no order of sums.
        worst, size = difference.amax(-1), values.amax(-1)
        shape = (-1,) + (1,) * (size.dim() - 1)
        weight = torch.as_tensor(rows.weight, device=size.device).view(shape).expand_as(size)
        sums = torch.stack(
            [
                difference.square_().sum(-1),
                values.square_().sum(-1),
                weight,
                torch.full_like(size, expected.shape[-1]),
                (size < rows.vanishing) * expected.shape[-1],
                bad.sum(-1),
            ]
        )
        relative = torch.where(size > 0, worst / size, 0.0)
        most = torch.stack([worst, size, relative]).flatten(1)
        sums = sums.to(torch.float64).flatten(1)
        by_size = (torch.frexp(size.clamp(min=2.0 ** (LOWEST_SIZE - 1))).exponent - LOWEST_SIZE).clamp_(0, COLUMNS - 1)
        labels = [by_size] if rows.length_class is None else [rows.length_class.view(shape).expand_as(size), by_size]
        column = torch.arange(COLUMNS, device=size.device)
        for label, part in zip(reversed(labels), (slice(COLUMNS, None), slice(COLUMNS)), strict=False):
            member = label.reshape(-1, 1) == column
            self.sums[:, part] += sums @ member.to(torch.float64)
            for line, value in zip(self.most[:, part], most, strict=True):
                torch.maximum(line, torch.where(member, value[:, None], 0.0).amax(0), out=line)

    def host(self) -> Counted:
        """Each of `MOST` and `SUMS`, by name, `[2 * COLUMNS]`; waits for the device."""
        return dict(zip((*self.MOST, *self.SUMS), torch.cat([self.most, self.sums]).cpu().numpy(), strict=True))


@dataclass(frozen=True)
class Limit:
    """What is allowed in one class: `columns` of a tally, the largest error, the norm of all errors, and the
    largest relative error of a vector."""

    name: str
    columns: tuple[int, ...]
    max_abs: float
    error_norm: float
    relative: float
    norm: float
    """Of the right values."""
    baseline: float
    """Plain PyTorch's largest error."""

    @property
    def by_length(self) -> bool:
        return min(self.columns) < COLUMNS


def limits(
    plain: Counted,
    dtype: torch.dtype,
    margin: float = MARGIN,
    *,
    floor: float = 0.0,
    vanishing_floor: float = 0.0,
    cancelling: bool = False,
    by_class: bool = True,
) -> tuple[Limit, ...]:
    """From the tally of plain PyTorch's errors in `dtype` to limits: of the whole tensor, then of each class.

    `margin` is that of the whole; `floor` is an absolute error allowed in every value, `vanishing_floor` one in
    vanishing vectors. Unless vectors are differences that may be `cancelling`, none may be further off than a few times
    the relative error that plain PyTorch has at worst: that finds one vector that is missing among millions of larger
    ones. The baseline is at least what rounding a result to `dtype` costs, though plain PyTorch may happen to be exact.
    """
    unit = torch.finfo(dtype).eps
    found = []
    whole = [COLUMNS + int(i) for i in np.flatnonzero(plain["weight"][COLUMNS:])]
    groups = ([whole] if whole else []) + (_judged(plain["weight"]) if by_class else [])
    for columns in groups:
        worst, largest, relative = (float(plain[name][columns].max()) for name in Tally.MOST)
        squared_errors, squares, weight, values, vanishing, _ = (
            float(plain[name][columns].sum()) for name in Tally.SUMS
        )
        norm, few = math.sqrt(squares), 1 / math.sqrt(weight)
        times = margin if columns is whole else CLASS_MARGIN
        max_abs = (times + MAX_CHANCE * few) * max(worst, unit / 4 * largest) + floor
        error_norm = (NORM_MARGIN + NORM_CHANCE * few) * max(math.sqrt(squared_errors), unit / 8 * norm)
        error_norm += floor * math.sqrt(values)
        if vanishing:
            max_abs += vanishing_floor
            error_norm += vanishing_floor * math.sqrt(vanishing)
        name = "all of it" if columns is whole else _class_name(columns)
        relative_limit = math.inf if cancelling else (CLASS_MARGIN + MAX_CHANCE * few) * max(relative, unit / 2)
        found.append(Limit(name, tuple(columns), max_abs, error_norm, relative_limit, norm, worst))
    return tuple(found)


def _judged(weight: npt.NDArray[np.float64]) -> list[list[int]]:
    """Columns that are judged together: each by itself, or with its neighbours where it weighs too little.

    From the class of the smallest errors (the longest sequences, the smallest vectors) to that of the largest.
    """
    groups: list[list[int]] = []
    for columns in (range(COLUMNS - 1, -1, -1), range(COLUMNS, 2 * COLUMNS)):
        pending: list[int] = []
        complete: list[list[int]] = []
        for column in columns:
            if weight[column] > 0:
                pending.append(column)
            if weight[pending].sum() >= SMALLEST_CLASS:
                complete.append(pending)
                pending = []
        if pending and complete:
            complete[-1] += pending
        elif pending:
            complete.append(pending)
        groups += complete
    return groups


def _class_name(columns: Sequence[int]) -> str:
    low, high = min(columns), max(columns)
    if high < COLUMNS:
        first, last = (2 ** (low - 1) + 1 if low else 0), 2**high
        return f"keys {first}..{last}" if first != last else f"keys {first}"
    power = LOWEST_SIZE - COLUMNS
    least = f"{2.0 ** (low + power - 1):.3g}" if low > COLUMNS else "0"
    return f"vectors of size {least}..{2.0 ** (high + power):.3g}"


def compare_vectors(
    name: str, got: object, expected: Tensor, *, dtype: torch.dtype, rows: Rows, limits: Sequence[Limit]
) -> TensorCheck:
    """Compares a result with the oracle's `expected`, `[rows, heads, D]`, class by class.

    `got` must have its shape and be of `dtype`; NaN and infinity never pass. What is reported is the whole tensor's:
    its largest error, the loosest limit and the baseline's largest error; `detail` names the class that failed most.
    """
    limit, baseline = (limits[0].max_abs, limits[0].baseline) if limits else (0.0, 0.0)
    if (problem := _mismatch(got, expected, dtype)) is not None:
        return TensorCheck(name, False, None, None, limit, baseline, problem)
    assert isinstance(got, Tensor)
    got = got.detach()
    if expected.numel() == 0:
        return TensorCheck(name, True, 0.0, 0.0, limit, baseline)

    tally = Tally(expected.device)
    tally.add(got, expected, rows)
    found = tally.host()
    whole = {key: values[COLUMNS:] for key, values in found.items()}
    if wrong_values := int(whole["not comparable"].sum()):
        detail = _describe_bad(got, expected, wrong_values)
        return TensorCheck(name, False, None, None, limit, baseline, detail)
    max_abs, relative = float(whole["error"].max()), _ratio(whole["squared errors"].sum(), whole["squares"].sum())
    failures: list[tuple[bool, float, str]] = []  # a class by length says most, then that of the largest excess
    for allowed in limits:
        columns = list(allowed.columns)
        worst = float(found["error"][columns].max())
        error = math.sqrt(found["squared errors"][columns].sum())
        if not worst <= allowed.max_abs:
            text = _describe_worst(got, expected, worst, allowed.max_abs)
            failures.append((allowed.by_length, _ratio(worst**2, allowed.max_abs**2), f"{allowed.name}: {text}"))
        if not error <= allowed.error_norm:
            what, unit = ("relative norm", allowed.norm) if allowed.norm else ("norm of the error", 1.0)
            text = f"{allowed.name}: {what} {error / unit:.3g} exceeds {allowed.error_norm / unit:.3g}"
            failures.append((allowed.by_length, _ratio(error**2, allowed.error_norm**2), text))
        relative_error = float(found["relative error"][columns].max())
        if not relative_error <= allowed.relative:
            text = f"{allowed.name}: a vector's relative error {relative_error:.3g} exceeds {allowed.relative:.3g}"
            failures.append((allowed.by_length, relative_error / allowed.relative, text))
    detail = max(failures)[-1] if failures else "" if relative < math.inf else ALL_ZEROS
    return TensorCheck(name, not failures, max_abs, finite_or_none(relative), limit, baseline, detail)


ALL_ZEROS = "the right answer is all zeros: no relative norm"


def _mismatch(got: object, expected: Tensor, dtype: torch.dtype) -> str | None:
    if not isinstance(got, Tensor):
        return f"expected a tensor, got {type(got).__name__}"
    if got.shape != expected.shape:
        return f"expected shape {list(expected.shape)}, got {list(got.shape)}"
    if got.dtype != dtype:
        return f"expected {dtype}, got {got.dtype}"
    if got.device != expected.device:
        return f"expected it on {expected.device}, got {got.device}"
    return None


def compare(
    name: str, got: object, expected: Tensor, *, dtype: torch.dtype, baseline: float, floor: float
) -> TensorCheck:
    """Compares one result with the oracle's `expected` (float32 or float64, any shape), all of it against one limit.

    `got` must have its shape, be of `dtype`, equal it exactly where it is infinite, and nowhere be further away than
    `2 * baseline + floor`, where `baseline` is the error of plain PyTorch in the input dtype. NaN never passes.
    """
    limit = MARGIN * baseline + floor

    def failed(detail: str) -> TensorCheck:
        return TensorCheck(name, False, None, None, limit, baseline, detail)

    if (problem := _mismatch(got, expected, dtype)) is not None:
        return failed(problem)
    assert isinstance(got, Tensor)
    got = got.detach()
    if expected.numel() == 0:
        return TensorCheck(name, True, 0.0, 0.0, limit, baseline)

    parts = [_distances(got[rows], expected[rows]) for rows in _chunks(expected)]
    worst, bad, squares, norm = torch.stack(parts).unbind(1)
    stats = torch.stack([worst.max(), bad.sum(), squares.sum(), norm.sum()]).tolist()  # the one synchronisation
    max_abs, wrong_values, relative = stats[0], int(stats[1]), _ratio(stats[2], stats[3])
    if wrong_values:
        return failed(_describe_bad(got, expected, wrong_values))
    if not max_abs <= limit:  # a limit of NaN (NaN in the inputs) lets nothing pass
        detail = _describe_worst(got, expected, max_abs, limit)
        return TensorCheck(name, False, max_abs, finite_or_none(relative), limit, baseline, detail)
    detail = "" if relative < float("inf") else ALL_ZEROS
    return TensorCheck(name, True, max_abs, finite_or_none(relative), limit, baseline, detail)


def _ratio(squares: float, norm: float) -> float:
    if squares == 0:
        return 0.0
    return float((squares / norm) ** 0.5) if norm else float("inf")


def _chunks(x: Tensor) -> Iterator[slice]:
    rows = max(1, CHUNK // max(1, x[0].numel())) if x.dim() else 1
    for start in range(0, x.shape[0], rows):
        yield slice(start, start + rows)


def _difference(got: Tensor, expected: Tensor) -> Tensor:
    """`|got - expected|`; 0 where both are the same infinity, NaN or infinite where only one is finite."""
    difference = (got.to(expected.dtype) - expected).abs_()
    return difference.masked_fill_((got == expected) & expected.isinf(), 0.0)


def _distances(got: Tensor, expected: Tensor) -> Tensor:
    """`[4]` float64: largest difference, number of values not comparable, sum of squared differences, of squares."""
    difference = _difference(got, expected)
    bad = ~difference.isfinite()
    difference.masked_fill_(bad, 0.0)
    finite = expected.masked_fill(expected.isinf(), 0.0)
    values = (difference.amax(), bad.sum(), difference.square_().sum(), finite.square_().sum())
    return torch.stack([value.to(torch.float64) for value in values])


def _describe_bad(got: Tensor, expected: Tensor, count: int) -> str:
    """How many values are not numbers, which kinds, where the first one is, and whether whole rows are affected."""
    nan = rows = 0
    first: list[int] = []
    first_row = -1
    for chunk in _chunks(expected):
        block, right = got[chunk], expected[chunk]
        bad = ~_difference(block, right).isfinite()
        nan += int(block.isnan().sum())
        if not first and bool(bad.any()):
            index = bad.nonzero()[0].tolist()
            first = [index[0] + chunk.start, *index[1:]]
        whole = block.flatten(1).isnan().all(1) if block.dim() > 1 else block.isnan()
        if first_row < 0 and bool(whole.any()):
            first_row = int(whole.nonzero()[0, 0]) + chunk.start
        rows += int(whole.sum())
    value, right_value = got[tuple(first)].item(), expected[tuple(first)].item()
    text = f"{count} of {expected.numel()} values cannot be compared ({nan} are NaN), the first at {first}: "
    text += f"got {value:.6g}, expected {right_value:.6g}"
    if rows:
        text += f"; {rows} whole rows are NaN, the first is row {first_row}: left unwritten?"
    return text


def _describe_worst(got: Tensor, expected: Tensor, max_abs: float, limit: float) -> str:
    """Where an error of just this size is; nothing else is known of its place."""
    for chunk in _chunks(expected):
        found = (_difference(got[chunk], expected[chunk]) == max_abs).nonzero()
        if len(found):
            index = found[0].tolist()
            at = [index[0] + chunk.start, *index[1:]]
            value, right = got[tuple(at)].item(), expected[tuple(at)].item()
            return f"|error| {max_abs:.3g} exceeds {limit:.3g} at {at}: got {value:.6g}, expected {right:.6g}"
    raise AssertionError("the difference was found nowhere")


@contextmanager
def poisoned_allocations(like: Sequence[Tensor] = ()) -> Iterator[None]:
    """Fills memory with NaN before others use it, so that rows which nobody writes do not hold right answers by chance.

    Inside, every `torch.empty` and its relatives, also in a backward pass and in custom operators, returns NaN (-1 for
    integers). That does not reach code that allocates below the dispatcher, such as a C++ extension; on a GPU it is
    given what the caching allocator has free, so on entry blocks for results of the shapes in `like` are filled with
    NaN bytes. The same kernels run as without it; the fills are launched beside them. Not for timed calls.
    """
    cuda: Any = torch.cuda
    if cuda.is_available() and cuda.is_initialized():
        _poison_free_blocks(like)
    poison: Any = _PoisonedEmpty
    with poison():
        yield


_EMPTY = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"})


class _PoisonedEmpty(TorchDispatchMode):  # type: ignore[no-untyped-call]
    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled functions run compiled, too: a mode that torch.compile sees makes it fall back to eager."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "aten":
            result = func(*args, **kwargs)
            if func._schema.name.removeprefix("aten::") in _EMPTY and type(result) is Tensor:
                _poison(result)
            return result
        # A mode is off inside its own handler, but custom operators allocate inside theirs: switch it on again, and go
        # on to the backend's kernel, as the dispatcher itself would after this mode.
        device = next((x.device for x in (*args, *kwargs.values()) if type(x) is Tensor), None)
        key = _BACKEND_KEYS.get(device.type) if device is not None else None
        if key is None:
            return func(*args, **kwargs)
        with self:
            return func.redispatch(torch._C.DispatchKeySet(key), *args, **kwargs)


_BACKEND_KEYS = {"cpu": torch._C.DispatchKey.CPU, "cuda": torch._C.DispatchKey.CUDA}


def _poison(x: Tensor) -> None:
    if x.numel() == 0 or x.device.type not in ("cpu", "cuda"):
        return
    if x.is_floating_point() or x.is_complex():
        x.fill_(float("nan"))
    elif x.dtype is torch.bool:
        x.fill_(True)
    elif x.dtype.is_signed:
        x.fill_(-1)
    else:
        x.fill_(torch.iinfo(x.dtype).max)


def _poison_free_blocks(like: Sequence[Tensor]) -> None:
    """Leaves free blocks full of 0xFF (NaN in every float format) that fit `like` in 2 and in 4 bytes an element.

    Two of 2 bytes, because a provider may allocate a second tensor of a result's size, and one of 4, which kernels sum
    up in. They come from the pool of the current stream, reusing what is free there. A block is left out where that
    would take more than half of the memory that is still to be had.
    """
    cuda: Any = torch.cuda
    taken = []
    sizes = [(x.numel() * width, x.device) for x in like if x.is_cuda for width in (2, 2, 4)]
    for size, device in sorted(sizes, key=lambda pair: pair[0], reverse=True):
        unused = cuda.memory_reserved(device) - cuda.memory_allocated(device)
        if size > (cuda.mem_get_info(device)[0] + unused) // 2:
            continue
        try:
            taken.append(torch.empty(size, dtype=torch.uint8, device=device).fill_(0xFF))
        except cuda.OutOfMemoryError:  # what is unused is in pieces
            continue
