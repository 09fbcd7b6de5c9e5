"""What rewritten kernel code calls: Triton's language as its compiler sees it, carried out at once.

Values are what the compiler has while it walks a kernel: ``tl.tensor`` for what a GPU computes, plain Python values for
compile-time constants (wrapped as ``tl.constexpr`` when they go to a built-in function), aggregates, buffers. Triton's
and TLX's own front ends run unchanged on top of :class:`.builder.Builder`.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.language.core import base_value, constexpr
from triton.language.extra import libdevice
from triton.language.extra.cuda import libdevice as cuda_libdevice
from triton.runtime.interpreter import TensorHandle
from triton.runtime.jit import ConstexprFunction, JITFunction

from . import reductions
from .memory import View
from .operators import int32, tensor, truth, unwrap
from .runtime import KernelError, semantic
from .tasks import replica_id

# Values --------------------------------------------------------------------------------------------------------------

_constants: dict[Any, constexpr] = {}


def wrapped(value: Any) -> Any:
    """A Python value as built-in functions expect it."""
    kind = type(value)
    if kind is int or kind is float or kind is bool or kind is str:
        key = (kind, value)
        found = _constants.get(key)
        if found is None:
            found = _constants[key] = constexpr(value)
        return found
    if kind is tuple or kind is list:
        return kind(wrapped(element) for element in value)
    return value


def _plain(value: Any) -> Any:
    """A built-in function's result as rewritten code holds it."""
    kind = type(value)
    if kind is tensor:
        return value
    if kind is constexpr:
        return value.value
    if kind is tuple:
        return tuple(_plain(element) for element in value)
    return tuple(_plain(element) for element in value.values) if kind is tl.tuple else value


def assigned(value: Any, name: Any) -> Any:
    """What ``name = value`` binds: a number becomes a scalar of the GPU. Buffers and barriers learn their name."""
    kind = type(value)
    if kind is tensor:
        return value
    if kind is constexpr:
        value = value.value
        kind = type(value)
    if kind is int and -(2**31) <= value < 2**31:
        return int32(value)
    if kind is int or kind is float or kind is bool:
        return semantic.to_tensor(value)
    if kind is tuple or kind is tl.tuple:
        names = name if isinstance(name, tuple) else (None,) * len(value)
        return tuple(assigned(element, n) for element, n in zip(value, names, strict=False))
    if isinstance(name, str):
        _name(value, name)
    return value


def constant(value: Any, name: str) -> Any:
    """What ``name: tl.constexpr = value`` binds."""
    if isinstance(value, tensor):
        raise KernelError(f"{name} is annotated as tl.constexpr, but its value is only known when the kernel runs")
    return unwrap(value)


def _name(value: Any, name: str) -> None:
    handle = getattr(value, "handle", None)
    if isinstance(handle, View):
        handle.allocation.name = handle.allocation.name or name
    elif getattr(value, "__triton_aggregate__", False):
        for field in value.__annotations__:
            for view in _views(getattr(value, field)):
                allocation = view.allocation
                if "." not in allocation.name:
                    allocation.name = f"{name}.{allocation.name or field}"


def _views(value: Any) -> Iterator[View]:
    handle = getattr(value, "handle", None)
    if isinstance(handle, View):
        yield handle
    elif getattr(value, "__triton_aggregate__", False):
        for field in value.__annotations__:
            yield from _views(getattr(value, field))


def item(value: Any, index: Any) -> Any:
    if isinstance(value, (tuple, list, str, tl.tuple, dict)):
        if isinstance(index, tensor):
            raise KernelError("a tuple is indexed by a value that is only known when the kernel runs")
        return _plain(value[unwrap(index)])
    return _plain(value.__getitem__(wrapped(index), _semantic=semantic))


def transposed(value: Any) -> Any:
    if not isinstance(value, tensor):
        return value.T
    return tl.trans(value, _semantic=semantic)


# Loops ---------------------------------------------------------------------------------------------------------------


class _Range:
    def __init__(self, first: Any, last: Any = None, step: Any = None, **_: Any) -> None:
        first, last = (0, first) if last is None else (first, last)
        self.bounds = [unwrap(bound) for bound in (first, last, 1 if step is None else step)]

    def __iter__(self) -> Iterator[tl.tensor]:
        wide = any(isinstance(bound, tensor) and bound.dtype == tl.int64 for bound in self.bounds)
        for value in builtins.range(*[_integer(bound) for bound in self.bounds]):
            yield tensor(TensorHandle(np.array([value], dtype=np.int64), tl.int64), tl.int64) if wide else int32(value)


def _integer(value: Any) -> int:
    return int(value.handle.data.item()) if isinstance(value, tensor) else int(value)


def _static_range(first: Any, last: Any = None, step: Any = None) -> builtins.range:
    bounds = [bound for bound in (first, last, step) if bound is not None]
    if any(isinstance(bound, tensor) for bound in bounds):
        raise KernelError("the bounds of tl.static_range must be compile-time constants")
    return builtins.range(*[int(unwrap(bound)) for bound in bounds])


# Calls ---------------------------------------------------------------------------------------------------------------


def call_method(owner: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    method = getattr(owner, name)
    if type(method) is JITFunction and isinstance(owner, base_value):
        return call_kernel_function(method, owner, *args, **kwargs)
    return call(method, *args, **kwargs)


def call(fn: Any, *args: Any, **kwargs: Any) -> Any:
    kind = type(fn)
    special = _special.get(id(fn))
    if special is not None:
        return special(*args, **kwargs)
    if kind is JITFunction:
        return call_kernel_function(fn, *args, **kwargs)
    if kind is constexpr:
        return call(fn.value, *args, **kwargs)
    if (kind is FunctionType or kind is MethodType) and getattr(fn, "__triton_builtin__", False):
        if kwargs:
            kwargs = {name: wrapped(value) for name, value in kwargs.items()}
        return _plain(fn(*[wrapped(arg) for arg in args], _semantic=semantic, **kwargs))
    if getattr(fn, "__triton_aggregate__", False):
        return _aggregate(fn, args, kwargs)
    if isinstance(fn, ConstexprFunction):
        return fn(*args, **kwargs)
    if isinstance(fn, type) and issubclass(fn, base_value | tl.dtype):
        return fn(*args, **kwargs)
    if getattr(fn, "__module__", "") == libdevice.__name__:  # a stub: the compiler puts the target's in its place
        return call(getattr(cuda_libdevice, fn.__name__), *args, **kwargs)
    plain = [unwrap(arg) for arg in args]
    return fn(*plain, **{name: unwrap(value) for name, value in kwargs.items()})


def call_kernel_function(fn: JITFunction, *args: Any, **kwargs: Any) -> Any:
    from .rewrite import rewritten

    return rewritten(fn.fn)(*args, **kwargs)


def _aggregate(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    made = cls(*args, _semantic=semantic, **kwargs)
    for field in cls.__annotations__:
        _name(getattr(made, field), field)
    return made


def _smallest(*args: Any, **kwargs: Any) -> Any:
    return _extreme(min, tl.minimum, args, kwargs)


def _largest(*args: Any, **kwargs: Any) -> Any:
    return _extreme(max, tl.maximum, args, kwargs)


def _extreme(python: Any, of_tensors: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    values = [unwrap(arg) for arg in args]
    if not any(isinstance(value, tensor) for value in values):
        return python(*values, **kwargs)
    result = values[0]
    for value in values[1:]:
        result = of_tensors(result, value, _semantic=semantic)
    return result


def _static_assert(condition: Any, message: Any = "", **_: Any) -> None:
    if not truth(condition):
        raise KernelError(f"static_assert failed: {unwrap(message)}")


def _hint(value: Any, *_: Any, **__: Any) -> Any:
    """What tells the compiler something of a value."""
    return value


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _dot_scaled(*_: Any, **__: Any) -> None:
    raise KernelError("tl.dot_scaled cannot be simulated; tlx.async_dot_scaled can")


def _commit(mBarrier: Any, two_ctas: Any = False, **_: Any) -> None:  # named as TLX names it
    """``tlx.tcgen05_commit``, whose front end drops whether a pair of CTAs is meant."""
    semantic.builder.commit(mBarrier.handle, bool(unwrap(two_ctas)))


_special: dict[int, Callable[..., Any]] = {
    id(builtins.range): _Range,
    id(tl.range): _Range,
    id(tl.static_range): _static_range,
    id(builtins.min): _smallest,
    id(builtins.max): _largest,
    id(tl.static_assert): _static_assert,
    id(tl.static_print): _nothing,
    id(builtins.print): _nothing,
    id(tl.device_print): _nothing,
    id(tl.debug_barrier): _nothing,
    id(tl.dot_scaled): _dot_scaled,
    id(tl.assume): _nothing,
    **{id(hint): _hint for hint in (tl.multiple_of, tl.max_contiguous, tl.max_constancy)},
    id(tl.reduce): reductions.reduce,
    id(tl.core._reduce_with_indices): reductions.reduce_with_indices,
    id(tl.associative_scan): reductions.scan,
    id(tl.map_elementwise): reductions.map_elementwise,
    id(tlx.async_task_replica_id): replica_id,
    id(tlx.tcgen05_commit): _commit,
}
