"""Operators and truth values of kernel code, as Triton's compiler takes them.

Two numbers are computed by Python; anything with a tensor goes to Triton's front end, but for the most frequent cases,
which NumPy computes at once.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.core import constexpr
from triton.runtime.interpreter import TensorHandle

from .places import here
from .runtime import KernelError, machine, semantic

tensor = tl.tensor
_small: dict[int, tl.tensor] = {}


def unwrap(value: Any) -> Any:
    return value.value if isinstance(value, constexpr) else value


def int32(value: int) -> tl.tensor:
    """A scalar."""
    found = _small.get(value)
    if found is None:
        value = (value + 2**31) % 2**32 - 2**31
        found = tensor(TensorHandle(np.array([value], dtype=np.int32), tl.int32), tl.int32)
        if -4096 <= value < 4096:
            _small[value] = found
    return found


def _int1(value: bool) -> tl.tensor:
    return TRUE if value else FALSE


TRUE = tensor(TensorHandle(np.array([True]), tl.int1), tl.int1)
FALSE = tensor(TensorHandle(np.array([False]), tl.int1), tl.int1)


_PYTHON: dict[str, Callable[[Any, Any], Any]] = {
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")},
    **{name: getattr(operator, name) for name in ("lshift", "rshift", "xor", "eq", "ne", "lt", "le", "gt", "ge")},
    "and": operator.and_,
    "or": operator.or_,
}
_COMPARE = {name: _PYTHON[name] for name in ("eq", "ne", "lt", "le", "gt", "ge")}
# On int32 scalars, for speed. Division goes towards zero, as on a GPU.
_SCALAR: dict[str, Callable[[int, int], int]] = {
    **{name: _PYTHON[name] for name in ("add", "sub", "mul", "and", "or", "xor", "lshift", "rshift")},
    "floordiv": lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
    "mod": lambda a, b: abs(a) % abs(b) * (-1 if a < 0 else 1),
}
_METHODS = {name: getattr(tensor, f"__{name}__") for name in _PYTHON if hasattr(tensor, f"__{name}__")}
_REVERSED = {name: getattr(tensor, f"__r{name}__") for name in _PYTHON if hasattr(tensor, f"__r{name}__")}
_MIRRORED = {"eq": "eq", "ne": "ne", "lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}


def binary(name: str, left: Any, right: Any) -> Any:
    left_kind, right_kind = type(left), type(right)
    if left_kind is constexpr:
        left, left_kind = left.value, type(left.value)
    if right_kind is constexpr:
        right, right_kind = right.value, type(right.value)
    if left_kind is not tensor and right_kind is not tensor:
        if left_kind is tuple and right_kind is list:  # Triton's tuples take both
            right = tuple(right)
        return _PYTHON[name](left, right)
    a = _int32_value(left, left_kind)
    if a is not None:
        b = _int32_value(right, right_kind)
        if b is not None:
            scalar = _SCALAR.get(name)
            if scalar is not None and not (b == 0 and name in ("mod", "floordiv")):
                return int32(scalar(a, b))
            if name in _COMPARE:
                return _int1(_COMPARE[name](a, b))
    fast = _elementwise(name, left, right)
    if fast is not None:
        return fast
    if left_kind is tensor:
        return _METHODS[name](left, right, _semantic=semantic)
    if name in _MIRRORED:
        return _METHODS[_MIRRORED[name]](right, left, _semantic=semantic)
    return _REVERSED[name](right, left, _semantic=semantic)


# The common cases of blocks, past Triton's front end: it takes ten times as long to find the type of a result as NumPy
# takes to compute it.
_BLOCKS: dict[int, dict[str, Any]] = {
    id(tl.float32): {"add": np.add, "sub": np.subtract, "mul": np.multiply, "truediv": np.divide},
    id(tl.int32): {
        "add": np.add,
        "sub": np.subtract,
        "mul": np.multiply,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    },
    id(tl.int1): {"and": np.logical_and, "or": np.logical_or},
}
_COMPARE_BLOCKS: dict[str, Any] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_templates: dict[Any, dict[str, Any]] = {}


def _elementwise(name: str, left: Any, right: Any) -> Any:
    """The result for operands of one type, or of one and a number that the type holds; None if it is not so simple."""
    dtype = left.dtype if type(left) is tensor else right.dtype
    functions = _BLOCKS.get(id(dtype))
    if functions is None:
        return None
    a, b = _operand(left, dtype), _operand(right, dtype)
    if a is None or b is None or (a.ndim != b.ndim and a.size != 1 and b.size != 1):
        return None
    blocks = any(type(operand) is tensor and operand.type is not dtype for operand in (left, right))
    function = functions.get(name)
    if function is not None:
        return made(function(a, b), dtype, blocks)
    function = _COMPARE_BLOCKS.get(name)
    return None if function is None or dtype is tl.int1 else made(function(a, b), tl.int1, blocks)


def _operand(value: Any, dtype: tl.dtype) -> np.ndarray | None:
    kind = type(value)
    if kind is tensor:
        data: np.ndarray = value.handle.data
        return data if value.dtype is dtype and data.ndim else None
    if dtype is tl.float32 and (kind is float or kind is int):
        return np.array([value], dtype=np.float32)
    if dtype is tl.int32 and kind is int and -(2**31) <= value < 2**31:
        return np.array([value], dtype=np.int32)
    return None


def made(data: np.ndarray, dtype: tl.dtype, block: bool) -> tl.tensor:
    """A block of ``data``, or a scalar, which has one element in one dimension."""
    key = (dtype.name, data.shape, block)
    template = _templates.get(key)
    if template is None:
        type_ = tl.block_type(dtype, list(data.shape)) if block else dtype
        template = _templates[key] = dict(vars(tensor(TensorHandle(data, dtype), type_)))
    result = object.__new__(tensor)
    result.__dict__.update(template)
    result.handle = TensorHandle(data, dtype)
    return result


def _int32_value(value: Any, kind: type) -> int | None:
    if kind is int:
        return value if -(2**31) <= value < 2**31 else None
    if kind is tensor and value.type is tl.int32 and value.handle.data.size == 1:
        return value.handle.data.item()  # type: ignore[no-any-return]
    return None


_UNARY: dict[str, Callable[[Any], Any]] = {
    "not": operator.not_,
    "neg": operator.neg,
    "pos": operator.pos,
    "invert": operator.invert,
}


def unary(name: str, value: Any) -> Any:
    value = unwrap(value)
    if isinstance(value, tensor):
        return getattr(value, f"__{name}__")(_semantic=semantic)
    return _UNARY[name](value)


def logical_and(*operands: Callable[[], Any]) -> Any:
    return _logical(operands, False, "logical_and")


def logical_or(*operands: Callable[[], Any]) -> Any:
    return _logical(operands, True, "logical_or")


def _logical(operands: tuple[Callable[[], Any], ...], decisive: bool, method: str) -> Any:
    """As the compiler does it: constants may end it early, values of the GPU are all computed."""
    value: Any = None
    result: Any = None
    for operand in operands:
        value = unwrap(operand())
        if not isinstance(value, tensor):
            if bool(value) is decisive:
                return value
        else:
            result = value if result is None else getattr(result, method)(value, _semantic=semantic)
    return value if result is None else result


def truth(value: Any) -> bool:
    value = unwrap(value)
    if isinstance(value, tensor):
        if value.handle.data.size != 1:
            raise KernelError("a block of values has no truth value: a branch needs a scalar")
        return bool(value.handle.data.item())
    return bool(value)


def goes_on(value: Any) -> bool:
    """The truth of a while loop's condition, which is counted."""
    machine().scheduler.turn(here)
    return truth(value)
