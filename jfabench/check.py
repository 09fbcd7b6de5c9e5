"""Is a result right? Comparing tensors with the oracle's, and making sure that unwritten memory does not look right.

Importing this module imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from jfabench.records import TensorCheck, finite_or_none

CHUNK = 2**26
"""Elements compared at a time: a few hundred MiB of float32 temporaries, whatever the size of the tensors."""

SMALL_REQUEST = 2**20
"""Bytes up to which torch's caching allocator serves a request from its pool of small segments."""

MARGIN = 2.0
"""How many times the baseline's error a result may have: the practice of flash-attention's own tests."""


def compare(
    name: str, got: object, expected: Tensor, *, dtype: torch.dtype, baseline: float, floor: float
) -> TensorCheck:
    """Compares one result with the oracle's `expected` (float32 or float64, any shape).

    `got` must have its shape, be of `dtype`, equal it exactly where it is infinite, and nowhere be further away than
    `2 * baseline + floor`, where `baseline` is the error of plain PyTorch in the input dtype. NaN never passes.
    """
    limit = MARGIN * baseline + floor

    def failed(detail: str) -> TensorCheck:
        return TensorCheck(name, False, None, None, limit, baseline, detail)

    if not isinstance(got, Tensor):
        return failed(f"expected a tensor, got {type(got).__name__}")
    if got.shape != expected.shape:
        return failed(f"expected shape {list(expected.shape)}, got {list(got.shape)}")
    if got.dtype != dtype:
        return failed(f"expected {dtype}, got {got.dtype}")
    if got.device != expected.device:
        return failed(f"expected it on {expected.device}, got {got.device}")
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
    detail = "" if relative < float("inf") else "the right answer is all zeros: no relative norm"
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
    for chunk in _chunks(expected):
        difference = _difference(got[chunk], expected[chunk])
        if float(difference.amax()) == max_abs:
            place = int(difference.argmax())
            index = [int(i) for i in torch.unravel_index(torch.tensor(place), difference.shape)]
            at = [index[0] + chunk.start, *index[1:]]
            value, right = got[tuple(at)].item(), expected[tuple(at)].item()
            return f"|error| {max_abs:.3g} exceeds {limit:.3g} at {at}: got {value:.6g}, expected {right:.6g}"
    raise AssertionError("the largest difference was found nowhere")


@contextmanager
def poisoned_allocations(like: Sequence[Tensor] = ()) -> Iterator[None]:
    """Fills memory with NaN before others use it, so that rows which nobody writes do not hold right answers by chance.

    Inside, every `torch.empty` and its relatives, also in a backward pass and in custom operators, returns NaN (-1 for
    integers). On a GPU the free blocks of the caching allocator are filled with NaN bytes on entry: they are what code
    that allocates below the dispatcher, such as a C++ extension, is given; `like` adds blocks of these tensors' sizes.
    The same kernels run as without it; the fills are launched beside them. Not for timed calls.
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
    """Takes every free block of the allocator's cache once, writes 0xFF (NaN in every float format), and returns it."""
    cuda: Any = torch.cuda
    device, stream = cuda.current_device(), cuda.current_stream().cuda_stream
    held = [torch.empty(x.numel() * x.element_size(), dtype=torch.uint8, device=device) for x in like if x.is_cuda]
    for block in held:
        block.fill_(0xFF)
    del held
    sizes = [
        block["size"]
        for segment in cuda.memory_snapshot()
        if segment["device"] == device and segment["stream"] == stream and not any(segment.get("segment_pool_id", ()))
        for block in segment["blocks"]
        # Small requests have a pool of their own, so a small rest of a large segment is not handed out.
        if block["state"] == "inactive" and (segment["segment_type"] == "small" or block["size"] > SMALL_REQUEST)
    ]
    taken = []
    for size in sorted(sizes, reverse=True):
        before = cuda.memory_reserved(device)
        taken.append(torch.empty(size, dtype=torch.uint8, device=device).fill_(0xFF))
        if cuda.memory_reserved(device) > before:
            break  # what is left cannot be had from the cache; more would only grow it
