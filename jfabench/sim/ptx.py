"""Inline PTX: what kernels write by hand, on whole blocks at once.

Simulated are arithmetic and conversions, predicates (``@p``, ``@!p``, ``setp`` of float32, ``and``, ``or``, ``xor`` and
``not`` of predicates), ``redux`` and ``vote.sync.any``, and branches to labels further on. Anything else is a
:class:`.runtime.KernelError`: loops, memory, barriers, special registers, ``setp`` of integers or with two targets,
integers of other than 32 bits. Of arithmetic, ``.ftz``, ``.sat`` and the way of rounding are ignored.

Registers hold bits, as ``uint32`` or, for pairs, ``uint64`` arrays with one element for each invocation; predicates are
``bool`` arrays. Approximate instructions (``ex2.approx`` and the like) are computed in float32 and rounded. Which
invocations share a warp depends on the layout, which is not known here: a vote is over all that take part in it, and
``redux`` over 32 consecutive rows.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from .numerics import bfloat16_bits, fp8_bits, numpy_type
from .runtime import KernelError

Registers = dict[str, np.ndarray]
WARP = 32


def execute(asm: str, constraints: str, values: list[Any], types: Any, pack: int) -> Any:
    """``inline_asm_elementwise`` on handles of equal shape; ``types`` is the result type or a list of them."""
    several = isinstance(types, (list, tuple))
    result_types = list(types) if several else [types]
    outputs = sum(constraint.strip().startswith("=") for constraint in constraints.split(","))
    shape = values[0].data.shape if values else (1,)
    invocations = max(1, int(np.prod(shape)) // pack)
    registers: Registers = {}
    number = outputs
    for value in values:
        for column in _to_registers(value.data, pack):
            registers[f"${number}"] = column
            number += 1
    _run(asm, registers, shape)
    results, number = [], 0
    for type_ in result_types:
        dtype = type_.scalar
        count = max(1, pack * numpy_size(dtype) // 4)
        columns = [np.broadcast_to(_value(f"${number + i}", registers), invocations) for i in range(count)]
        number += count
        results.append(TensorHandle(_from_registers(columns, dtype, pack).reshape(shape), dtype))
    return Results(results)


@dataclass(frozen=True)
class Results:
    """What front ends expect of an operation with several results."""

    handles: list[TensorHandle]

    def get_result(self, i: int) -> TensorHandle:
        return self.handles[i]


def numpy_size(dtype: tl.dtype) -> int:
    return int(np.dtype(numpy_type(dtype)).itemsize)


def _to_registers(data: np.ndarray, pack: int) -> list[np.ndarray]:
    """``pack`` consecutive elements go to one invocation: a register each, or several in one if they are small."""
    rows = np.ascontiguousarray(data).reshape(-1, pack)
    if data.itemsize == 8:
        return list(rows.view(np.uint64).T)
    if data.itemsize == 4:
        return list(rows.view(np.uint32).T)
    if data.itemsize * pack % 4:
        kind = np.dtype(f"u{data.itemsize}")
        return [column.astype(np.uint32) for column in rows.view(kind).T]
    return list(rows.view(np.uint32).T)


def _from_registers(columns: list[np.ndarray], dtype: tl.dtype, pack: int) -> np.ndarray:
    kind = np.dtype(numpy_type(dtype))
    bits = np.stack(columns, axis=1)
    if kind.itemsize * pack < 4:
        return bits.astype(np.dtype(f"u{kind.itemsize}")).view(kind)
    return np.ascontiguousarray(bits).view(kind)


def _run(asm: str, registers: Registers, shape: tuple[int, ...]) -> None:
    text = re.sub(r"\s+", " ", re.sub(r"//[^\n]*", "", asm)).strip()
    text = text.removeprefix("{").removesuffix("}") if text.startswith("{") and text.endswith("}") else text
    skipping: dict[str, np.ndarray] = {}  # the invocations that have branched to a label further on
    for statement in text.split(";"):
        words = statement.strip()
        while label := re.match(r"([A-Za-z_$][\w$]*):", words):
            skipping.pop(label[1], None)
            words = words[label.end() :].strip()
        if not words or words.startswith(".reg"):
            continue
        taken = ~functools.reduce(np.logical_or, skipping.values(), np.zeros(1, bool))
        if words.startswith("@"):
            guard, _, words = words.removeprefix("@").partition(" ")
            taken = taken & _predicate(guard, registers)
        opcode, _, rest = words.strip().partition(" ")
        operands = re.findall(r"\{[^}]*\}|[^,\s]+", rest)
        if not operands:
            raise _refusal(opcode)
        if opcode in ("bra", "bra.uni"):
            skipping[operands[0]] = taken | skipping.get(operands[0], np.zeros(1, bool))
        else:
            _instruction(opcode, operands, registers, shape, taken)
    if skipping:
        raise KernelError(f"inline PTX: only branches to labels further on can be simulated, not to {min(skipping)}")


def _refusal(opcode: str, why: str = "") -> KernelError:
    return KernelError(f"the PTX instruction {opcode} cannot be simulated{why}")


def _value(text: str, registers: Registers) -> np.ndarray:
    if text in registers:
        if registers[text].dtype == np.bool_:
            raise KernelError(f"inline PTX: {text} is a predicate, where bits are needed")
        return registers[text]
    if text.startswith("{"):
        parts = [_value(part.strip(), registers) for part in text.strip("{}").split(",")]
        return _joined(parts)
    try:
        number = int(text[2:], 16) if text.lower().startswith("0f") else int(text, 0)
    except ValueError:
        why = "neither a number nor a register with a value"
        raise KernelError(f"inline PTX: the operand {text} cannot be simulated: it is {why}") from None
    return np.array([number & 0xFFFFFFFF], dtype=np.uint32)


def _predicate(text: str, registers: Registers) -> np.ndarray:
    """Of ``p``, or of ``!p``."""
    name = text.removeprefix("!")
    if name not in registers or registers[name].dtype != np.bool_:
        raise KernelError(f"inline PTX: {name} is not a predicate with a value")
    return ~registers[name] if text.startswith("!") else registers[name]


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    """The first part has the lowest bits. Two registers make 64 bits; of what is narrower, 32."""
    if all(part.dtype == np.uint16 for part in parts):
        return parts[0].astype(np.uint32) | (parts[1].astype(np.uint32) << np.uint32(16))
    return parts[0].astype(np.uint64) | (parts[1].astype(np.uint64) << np.uint64(32))


def _set(target: str, value: np.ndarray, registers: Registers, taken: np.ndarray) -> None:
    """Gives a register its value in the invocations where the instruction is ``taken``."""
    if target.startswith("{"):
        names = [name.strip() for name in target.strip("{}").split(",")]
        if value.dtype == np.uint64:
            parts = [(value & np.uint64(0xFFFFFFFF)).astype(np.uint32), (value >> np.uint64(32)).astype(np.uint32)]
        else:
            width = 32 // len(names)
            kind = np.uint16 if width == 16 else np.uint32
            parts = [
                ((value >> np.uint32(i * width)) & np.uint32((1 << width) - 1)).astype(kind) for i in range(len(names))
            ]
        for name, part in zip(names, parts, strict=True):
            _set(name, part, registers, taken)
    elif taken.all():
        registers[target] = value
    else:
        # What a register never had elsewhere is poison: all ones. A predicate has no such value.
        registers[target] = np.where(taken, value, registers.get(target, ~np.zeros_like(value)))


def _f32(bits: np.ndarray) -> np.ndarray:
    return np.asarray(np.ascontiguousarray(bits).view(np.float32))


def _bits(values: np.ndarray) -> np.ndarray:
    return np.asarray(np.ascontiguousarray(values, dtype=np.float32).view(np.uint32))


def _fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return np.asarray((a.astype(np.float64) * b + c).astype(np.float32))


_FLOAT: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "fma": _fma,
    "max": np.fmax,
    "min": np.fmin,
    "abs": np.abs,
    "neg": np.negative,
    "ex2": np.exp2,
    "lg2": np.log2,
    "tanh": np.tanh,
    "rcp": lambda x: np.float32(1) / x,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: np.float32(1) / np.sqrt(x),
}
_INTEGER: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.bitwise_not,
    "shl": lambda a, b: np.where(b > 31, np.uint32(0), a << (b & np.uint32(31))),
    "shr": lambda a, b: np.where(b > 31, np.uint32(0), a >> (b & np.uint32(31))),
}
_COMPARISONS: dict[str, Callable[..., np.ndarray]] = {
    "eq": np.equal,
    "ne": lambda a, b: (a < b) | (a > b),
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    # True if either is NaN: the opposites of those above.
    "equ": lambda a, b: ~((a < b) | (a > b)),
    "neu": np.not_equal,
    "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b),
    "gtu": lambda a, b: ~(a <= b),
    "geu": lambda a, b: ~(a < b),
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "nan": lambda a, b: np.isnan(a) | np.isnan(b),
}
_LOGICAL: dict[str, np.ufunc] = {
    "and": np.logical_and,
    "or": np.logical_or,
    "xor": np.logical_xor,
    "not": np.logical_not,
}


def _instruction(
    opcode: str, operands: list[str], registers: Registers, shape: tuple[int, ...], taken: np.ndarray
) -> None:
    name, *modifiers = opcode.split(".")
    target = operands[0]
    if name in ("setp", "vote") or "pred" in modifiers:
        _set(target, _decide(opcode, operands, registers, taken), registers, taken)
        return
    sources = [_value(text, registers) for text in operands[1:]]
    if name == "mov":
        value = sources[0]
        if len(modifiers) and modifiers[0] == "b32" and value.dtype == np.uint16:
            value = value.astype(np.uint32)
    elif name == "cvt":
        value = _convert(modifiers, sources)
    elif name == "redux":
        value = _warp_reduce(modifiers, sources[0], shape)
    elif "f32x2" in modifiers:
        halves = [_float_pair(source) for source in sources]
        function = _FLOAT[name]
        low, high = function(*[half[0] for half in halves]), function(*[half[1] for half in halves])
        value = _bits(low).astype(np.uint64) | (_bits(high).astype(np.uint64) << np.uint64(32))
    elif "f32" in modifiers and name in _FLOAT:
        value = _bits(_FLOAT[name](*[_f32(source) for source in sources]))
    elif name in _INTEGER and re.fullmatch(r"(lo\.)?[bsu]32", ".".join(modifiers)) and opcode != "shr.s32":
        value = _INTEGER[name](*[source.astype(np.uint32) for source in sources]).astype(np.uint32)
    else:
        raise _refusal(opcode)
    _set(target, value, registers, taken)


def _decide(opcode: str, operands: list[str], registers: Registers, taken: np.ndarray) -> np.ndarray:
    """What an instruction gives its predicate."""
    if any("|" in text for text in operands):
        raise _refusal(opcode, f" with two targets, {operands[0]}")
    texts = operands[1:]
    name, _, kind = opcode.partition(".")
    if kind == "pred" and name in _LOGICAL and len(texts) == _LOGICAL[name].nin:
        return np.asarray(_LOGICAL[name](*[_predicate(text, registers) for text in texts]))
    if opcode == "vote.sync.any.pred" and len(texts) == 2:
        if (_value(texts[1], registers) != 0xFFFFFFFF).any():
            raise _refusal(opcode, f" among some of a warp, {texts[1]}")
        ayes = _predicate(texts[0], registers) & taken
        return np.full(ayes.shape, ayes.any())
    setp = re.fullmatch(r"setp\.(\w+)(?:\.(and|or|xor))?\.f32", opcode)
    if not setp or setp[1] not in _COMPARISONS or len(texts) != (3 if setp[2] else 2):
        raise _refusal(opcode)
    compared = _COMPARISONS[setp[1]](*[_f32(_value(text, registers)) for text in texts[:2]])
    return np.asarray(_LOGICAL[setp[2]](compared, _predicate(texts[2], registers)) if setp[2] else compared)


def _float_pair(bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    wide = bits.astype(np.uint64)
    return _f32((wide & np.uint64(0xFFFFFFFF)).astype(np.uint32)), _f32((wide >> np.uint64(32)).astype(np.uint32))


def _convert(modifiers: list[str], sources: list[np.ndarray]) -> np.ndarray:
    kinds = [m for m in modifiers if m not in ("rn", "rz", "rp", "rm", "ftz", "satfinite", "relu", "sat", "rni")]
    target = kinds[0]
    if target in ("u32", "s32") and kinds[1] in ("u16", "u8", "s16", "u32"):
        return sources[0].astype(np.uint32)
    if target in ("e4m3x2", "e5m2x2"):  # the first source becomes the upper half
        name = "fp8e4nv" if target == "e4m3x2" else "fp8e5"
        return _halves([fp8_bits(_f32(source), name) for source in sources], np.uint16)
    if target == "ue8m0x2":
        return _halves([e8m0_bits(_f32(source)) for source in sources], np.uint16)
    if target == "bf16x2":
        return _halves([bfloat16_bits(_f32(source)) for source in sources], np.uint32)
    if target == "f16x2":
        return _halves([_f32(source).astype(np.float16).view(np.uint16) for source in sources], np.uint32)
    raise KernelError(f"the PTX conversion cvt.{'.'.join(modifiers)} cannot be simulated")


def _halves(parts: list[np.ndarray], kind: Any) -> np.ndarray:
    """The first of two parts becomes the upper half of a register."""
    upper, lower = (part.astype(kind) for part in parts)
    return np.asarray(lower | (upper << kind(4 * upper.itemsize)))


def e8m0_bits(values: np.ndarray) -> np.ndarray:
    """Biased exponent of the smallest power of two that is not below ``values``: 2 ** (bits - 127)."""
    bits = _bits(np.abs(values))
    exponent = (bits >> np.uint32(23)).astype(np.int64) + ((bits & np.uint32(0x7FFFFF)) != 0)
    return np.asarray(np.clip(exponent, 0, 254).astype(np.uint8))


def _warp_reduce(modifiers: list[str], bits: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """``redux.sync``: over 32 consecutive rows, which the lanes of a warp hold."""
    function = np.fmax if "max" in modifiers else np.fmin
    values = _f32(bits).reshape(shape)
    groups = values.reshape(-1, WARP, *shape[1:])
    reduced = function.reduce(groups, axis=1, keepdims=True)
    return _bits(np.broadcast_to(reduced, groups.shape).reshape(-1))


_LIBDEVICE: dict[str, Callable[..., np.ndarray]] = {
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "rsqrtf": lambda x: np.float32(1) / np.sqrt(x),
    "sqrtf": np.sqrt,
    "fast_dividef": np.divide,
    "fdividef": np.divide,
    "fast_fdividef": np.divide,
    "exp2f": np.exp2,
    "fast_expf": np.exp,
    "expf": np.exp,
    "fast_log2f": np.log2,
    "tanhf": np.tanh,
    "fast_tanhf": np.tanh,
    "rcp_rn": lambda x: np.float32(1) / x,
}


def libdevice(symbol: str, args: list[Any], ret_type: Any) -> TensorHandle:
    """A function of CUDA's libdevice."""
    function = _LIBDEVICE.get(symbol.removeprefix("__nv_"))
    if function is None:
        raise KernelError(f"the libdevice function {symbol} cannot be simulated")
    dtype = ret_type.scalar
    return TensorHandle(function(*[arg.data for arg in args]).astype(numpy_type(dtype)), dtype)
