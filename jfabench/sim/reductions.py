"""Reductions, scans and element-wise functions: the built-ins that take a kernel's function as an argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import standard
from triton.runtime.interpreter import TensorHandle

from .numerics import narrow, numpy_type, widen
from .runtime import KernelError, semantic


def _tensor(data: np.ndarray, dtype: tl.dtype) -> tl.tensor:
    if data.shape == ():
        return tl.tensor(TensorHandle(data.reshape(1), dtype), dtype)
    return tl.tensor(TensorHandle(data, dtype), tl.block_type(dtype, list(data.shape)))


_BY_NUMPY: dict[int, Callable[..., np.ndarray]] = {
    id(standard._sum_combine): np.add.reduce,
    id(standard._elementwise_max): np.fmax.reduce,  # a NaN beside a number is dropped, as by the hardware's max
    id(standard._elementwise_min): np.fmin.reduce,
    id(standard._xor_combine): np.bitwise_xor.reduce,
    id(standard._or_combine): np.bitwise_or.reduce,
}


def reduce(input: Any, axis: Any, combine_fn: Any, keep_dims: Any = False, **_: Any) -> Any:  # noqa: A002
    """``tl.reduce``: over one axis, or over all elements with ``axis`` None."""
    axis, keep_dims = (getattr(value, "value", value) for value in (axis, keep_dims))
    inputs = tuple(input) if isinstance(input, (tuple, tl.tuple)) else (input,)
    rank = len(inputs[0].shape)
    blocks = [value.handle.data for value in inputs]
    if axis is None:
        blocks, along = [block.reshape(-1) for block in blocks], 0
    else:
        along = axis % rank if rank else 0
    numpy_form = _BY_NUMPY.get(id(combine_fn)) if len(inputs) == 1 else None
    if numpy_form is not None:
        dtype = inputs[0].dtype
        results = [narrow(np.asarray(numpy_form(widen(blocks[0], dtype), axis=along)), dtype)]
    else:
        results = _fold(blocks, [value.dtype for value in inputs], along, combine_fn)
    if keep_dims:
        shape = [1] * rank if axis is None else [1 if i == along else n for i, n in enumerate(blocks[0].shape)]
        results = [result.reshape(shape) for result in results]
    made = tuple(_tensor(np.asarray(result), value.dtype) for result, value in zip(results, inputs, strict=True))
    return made if isinstance(input, (tuple, tl.tuple)) else made[0]


def reduce_with_indices(input: Any, axis: Any, combine_fn: Any, keep_dims: Any = False, **_: Any) -> Any:  # noqa: A002
    """The reduction of values and their places along an axis, which ``tl.argmax`` and the like are made of."""
    shape = input.handle.data.shape
    along = getattr(axis, "value", axis) % len(shape)
    places = np.arange(shape[along], dtype=np.int32).reshape([-1 if i == along else 1 for i in range(len(shape))])
    return reduce((input, _tensor(np.broadcast_to(places, shape), tl.int32)), along, combine_fn, keep_dims)


def _fold(blocks: list[np.ndarray], dtypes: list[tl.dtype], axis: int, combine: Any) -> list[np.ndarray]:
    """Halves are combined with each other until one element is left."""
    blocks = [np.moveaxis(block, axis, 0) for block in blocks]
    while len(blocks[0]) > 1:
        half = len(blocks[0]) // 2
        blocks = _combined([b[:half] for b in blocks], [b[half : 2 * half] for b in blocks], dtypes, combine)
    return [block[0] for block in blocks]


def _combined(
    left: list[np.ndarray], right: list[np.ndarray], dtypes: list[tl.dtype], combine: Any
) -> list[np.ndarray]:
    from .language import call

    values = [_tensor(np.ascontiguousarray(b), d) for b, d in zip((*left, *right), (*dtypes, *dtypes), strict=True)]
    result = call(combine, *values)
    results = result if isinstance(result, tuple) else (result,)
    return [
        np.broadcast_to(value.handle.data.astype(numpy_type(dtype), copy=False), left[0].shape)
        for value, dtype in zip(results, dtypes, strict=True)
    ]


def scan(input: Any, axis: Any, combine_fn: Any, reverse: Any = False, **_: Any) -> Any:  # noqa: A002
    """``tl.associative_scan``, inclusive."""
    axis, reverse = (getattr(value, "value", value) for value in (axis, reverse))
    inputs = tuple(input) if isinstance(input, (tuple, tl.tuple)) else (input,)
    dtypes = [value.dtype for value in inputs]
    blocks = [np.moveaxis(value.handle.data, axis, 0) for value in inputs]
    if reverse:
        blocks = [block[::-1] for block in blocks]
    rows = [[block[i : i + 1] for block in blocks] for i in range(len(blocks[0]))]
    for i in range(1, len(rows)):
        rows[i] = _combined(rows[i - 1], rows[i], dtypes, combine_fn)
    results = [np.concatenate([row[k] for row in rows]) for k in range(len(inputs))]
    if reverse:
        results = [result[::-1] for result in results]
    made = tuple(_tensor(np.moveaxis(r, 0, axis), d) for r, d in zip(results, dtypes, strict=True))
    return made if isinstance(input, (tuple, tl.tuple)) else made[0]


def map_elementwise(scalar_fn: Any, *args: Any, pack: Any = 1, **_: Any) -> Any:
    """``tl.map_elementwise``: on whole blocks where the function has no branch, else element by element."""
    from .language import call

    if getattr(pack, "value", pack) != 1:
        raise KernelError("map_elementwise with pack > 1 cannot be simulated")
    values = [semantic.to_tensor(getattr(arg, "value", arg)) for arg in args]
    blocks = np.broadcast_arrays(*[value.handle.data for value in values])
    dtypes = [value.dtype for value in values]
    try:
        return call(scalar_fn, *[_tensor(block, dtype) for block, dtype in zip(blocks, dtypes, strict=True)])
    except KernelError:
        pass
    results: list[tuple[Any, ...]] = []
    for elements in zip(*[block.reshape(-1) for block in blocks], strict=True):
        scalars = [_tensor(np.asarray(e, numpy_type(d)), d) for e, d in zip(elements, dtypes, strict=True)]
        result = call(scalar_fn, *scalars)
        results.append(result if isinstance(result, tuple) else (result,))
    shape = blocks[0].shape
    made = tuple(
        _tensor(
            np.array([row[k].handle.data.item() for row in results]).reshape(shape).astype(numpy_type(v.dtype)), v.dtype
        )
        for k, v in enumerate(results[0])
    )
    return made if len(made) > 1 else made[0]
