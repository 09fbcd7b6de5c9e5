"""Launching kernels, compiled or, for tensors on the CPU, under Triton's interpreter (``TRITON_INTERPRET=1``).

The stock interpreter is not faithful for bfloat16: it truncates where the hardware rounds to nearest even, and it
multiplies the raw bits of bfloat16 dot operands unless they are widened first. It also patches ``triton.language`` anew
in every device function, which costs more than the function itself. The corrections here are in force only during a
launch, only under the interpreter, and touch nothing that a GPU runs.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton.language as tl
from triton.runtime.jit import JITFunction


def is_interpreted(kernel: Any) -> bool:
    """Whether ``kernel`` was decorated while the interpreter was enabled."""
    return not isinstance(kernel, JITFunction)


def run_kernel(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Launch ``kernel[grid](*args, **options)``; a grid without programs is no launch."""
    if 0 in grid:
        return
    if is_interpreted(kernel):
        with _faithful_interpreter():
            kernel[grid](*args, **options)
    else:
        kernel[grid](*args, **options)


def bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """Bits of float32 ``values`` rounded to bfloat16, to nearest with ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def widen_bfloat16(bits: np.ndarray) -> np.ndarray:
    """float32 values of bfloat16 ``bits``; exact."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


@contextlib.contextmanager
def _faithful_interpreter() -> Iterator[None]:
    from triton.runtime import interpreter

    convert_float, patch_lang = interpreter._convert_float, interpreter._patch_lang
    patched = False

    def convert(data: np.ndarray, source: tl.dtype, target: tl.dtype, rounding: Any) -> np.ndarray:
        if (source, target) == (tl.float32, tl.bfloat16):
            return bfloat16_bits(data)
        if (source, target) == (tl.bfloat16, tl.float32):
            return widen_bfloat16(data)
        converted: np.ndarray = convert_float(data, source, target, rounding)
        return converted

    def patch_once(_fn: Any) -> Any:
        nonlocal patched
        if patched:
            return interpreter._LangPatchScope()
        patched = True
        return patch_lang(types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))

    def dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        operands = (widen_bfloat16(x.data) if x.dtype.scalar == tl.bfloat16 else x.data for x in (a, b))
        left, right = (torch.from_numpy(x.astype(d.data.dtype)) for x in operands)
        return interpreter.TensorHandle((left @ right).numpy() + d.data, d.dtype.scalar)

    with (
        mock.patch.object(interpreter, "_convert_float", convert),
        mock.patch.object(interpreter, "_patch_lang", patch_once),
        mock.patch.object(interpreter.InterpreterBuilder, "create_dot", dot),
        np.errstate(invalid="ignore", over="ignore"),
        _one_thread(),
    ):
        yield


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """A block's matmul is too small to share among threads: waking and joining them takes longer than the product."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
