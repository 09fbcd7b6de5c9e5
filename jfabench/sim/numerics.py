"""Floating-point formats and matrix products as the hardware has them, on NumPy arrays.

bfloat16 and 8-bit floats are held as their bits. Conversions round to nearest, ties to even; 8-bit ones saturate.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl

NUMPY_TYPES = {
    "int1": np.bool_,
    "int8": np.int8,
    "uint8": np.uint8,
    "int16": np.int16,
    "uint16": np.uint16,
    "int32": np.int32,
    "uint32": np.uint32,
    "int64": np.int64,
    "uint64": np.uint64,
    "fp16": np.float16,
    "bf16": np.uint16,
    "fp32": np.float32,
    "fp64": np.float64,
}
_TORCH_FP8 = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}
_FP8_MAX = {"fp8e4nv": 448.0, "fp8e5": 57344.0}
_FP8_TABLES: dict[str, np.ndarray] = {}
POISON = 0xFF  # every byte of memory that was never written
BITS = ("bf16", "fp8e4nv", "fp8e5")  # formats that NumPy does not know


def numpy_type(dtype: tl.dtype) -> Any:
    """The NumPy type in which blocks of ``dtype`` are held: bfloat16 and 8-bit floats as their bits."""
    return np.uint64 if isinstance(dtype, tl.pointer_type) else NUMPY_TYPES.get(dtype.name, np.uint8)


def bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """Bits of float32 ``values`` rounded to bfloat16; NaN keeps its upper bits, so that poison stays poison."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    nan = np.isnan(values)
    return np.where(nan, (bits >> 16).astype(np.uint16) | np.uint16(0x40), rounded) if nan.any() else rounded


def fp8_bits(values: np.ndarray, name: str) -> np.ndarray:
    """Bits of float32 ``values`` rounded to an 8-bit format; what is too large becomes the largest, NaN stays NaN."""
    limit = _FP8_MAX[name]
    exact = np.ascontiguousarray(values, dtype=np.float32)
    bits: np.ndarray = torch.from_numpy(np.clip(exact, -limit, limit)).to(_TORCH_FP8[name]).view(torch.uint8).numpy()
    nan = np.isnan(exact)
    if not nan.any():
        return bits
    return np.asarray(np.where(nan, np.where(poisoned(exact, tl.float32), POISON, 0x7F).astype(np.uint8), bits))


def poisoned(values: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """Which elements hold what memory holds before it is written: a NaN of which every bit is set.

    Arithmetic passes it on, and rounding to a narrower format keeps it, so that it says of a result that it was
    computed from bytes that were never written. No operation on numbers makes one.
    """
    kind = np.dtype(f"u{values.itemsize}")
    return np.asarray(values.view(kind) == kind.type(np.iinfo(kind).max))


def poison_like(values: np.ndarray) -> np.ndarray:
    return np.full(values.nbytes, POISON, np.uint8).view(values.dtype).reshape(values.shape)


def fp8_table(name: str) -> np.ndarray:
    """The 256 values of an 8-bit format, float32."""
    if name not in _FP8_TABLES:
        bits = torch.arange(256, dtype=torch.uint8)
        _FP8_TABLES[name] = bits.view(_TORCH_FP8[name]).to(torch.float32).numpy()
    return _FP8_TABLES[name]


def widen(data: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """The values of a block as numbers that NumPy can compute with; exact."""
    if dtype.name == "bf16":
        return (data.astype(np.uint32) << 16).view(np.float32)
    if dtype.name in _TORCH_FP8:
        return np.asarray(fp8_table(dtype.name)[data])
    return data


def narrow(values: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """Numbers in the form in which blocks of ``dtype`` are held, rounded to nearest even."""
    if dtype.name == "bf16":
        return bfloat16_bits(values)
    if dtype.name in _TORCH_FP8:
        return fp8_bits(values, dtype.name)
    return values.astype(numpy_type(dtype), copy=False)


def matmul(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """``a @ b`` of float32 arrays. By torch, whose threads a launch can limit: small products are slow with several."""
    return (torch.from_numpy(np.ascontiguousarray(a)) @ torch.from_numpy(np.ascontiguousarray(b))).numpy()


def truncate_to_tf32(values: np.ndarray) -> np.ndarray:
    """float32 with the 13 low bits of the mantissa dropped, as tensor cores read it."""
    return (np.ascontiguousarray(values, dtype=np.float32).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def operand(data: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """A matmul operand as float32."""
    if dtype.name == "fp32":
        return truncate_to_tf32(data)
    return np.asarray(widen(data, dtype), dtype=np.float32)


def combined(kind: Any, old: np.ndarray, new: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """What a reduction of ``kind`` (an ``ir.DESCRIPTOR_REDUCE_KIND``) leaves in memory."""
    name = str(kind).rpartition(".")[2].lower()
    if name in ("and", "or", "xor"):
        return np.asarray(getattr(np, f"bitwise_{name}")(old, new))
    function = {"add": np.add, "min": np.fmin, "max": np.fmax}[name]
    return narrow(np.asarray(function(widen(old, dtype), widen(new, dtype))), dtype)
