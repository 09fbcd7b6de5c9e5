"""Running a kernel on the simulator: once, or under many schedules."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton.language as tl
from triton.backends.nvidia.compiler import CUDAOptions
from triton.runtime.autotuner import Autotuner, Heuristics
from triton.runtime.interpreter import TensorHandle
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from . import builder as _builder  # noqa: F401  # gives the front ends their builder
from . import fakes, places
from .asyncops import Descriptor
from .machine import Machine, Target
from .operators import int32
from .report import Finding, Report, Run
from .rewrite import rewritten
from .runtime import KernelError, running, semantic
from .scheduler import POLICIES, Operation, Policy
from .targets import TargetError, defined, message_of

MAX_STEPS = 2_000_000  # a step is a stretch of one task, or a stage of one operation
RESIDENT = 16  # clusters that run at once, if the caller does not say
RESIDENT_CLC = 2  # likewise, where a kernel asks for further tiles itself

INTERPRETED = "Triton's own interpreter is on: unset TRITON_INTERPRET before Python starts"

Grid = tuple[int, ...] | Callable[[dict[str, Any]], tuple[int, ...]]


def launch(
    kernel: Any,
    grid: Grid,
    *args: Any,
    arch: str = "sm_90",
    seed: int = 0,
    policy: Policy = "random",
    resident: int | None = None,
    detect_races: bool = True,
    config: int | Callable[[Any], bool] = 0,
    max_steps: int = MAX_STEPS,
    **kwargs: Any,
) -> Run:
    """Run ``kernel[grid](*args, **kwargs)`` once, under the schedule that ``seed`` and ``policy`` give.

    Tensors among ``args`` are CPU tensors, and are written to like on a GPU. ``kwargs`` are the kernel's further
    arguments and launch options (``num_warps``, ``ctas_per_cga``). At most ``resident`` clusters run at once. Of an
    autotuned kernel ``config`` chooses the configuration: its number among those that survive pruning, or a predicate.

    Raises:
        TargetError: the kernel has no configuration of this number.
        KernelError: the source uses what no compiler accepts, or what cannot be simulated.
    """
    function, arguments, options = resolve(kernel, args, kwargs, config)
    if int(options.get("num_ctas") or 1) > 1:
        raise KernelError("num_ctas > 1 cannot be simulated: the compiler would spread a block over CTAs")
    target = Target(arch)
    sim = Machine(target, seed, policy, function.fn.__name__, detect_races=detect_races, max_steps=max_steps)
    sim.num_warps = int(options.get("num_warps") or 4)
    sim.cluster_shape = _three(options.get("ctas_per_cga") or options.get("cluster_dims") or (1,))
    sim.grid = _three(grid(arguments) if callable(grid) else grid)
    resident = resident or (RESIDENT_CLC if _uses_clc(function.fn) else RESIDENT)
    began = time.perf_counter()
    with running(sim), simulated_language(), fakes.driver(target.capability):
        values = {
            name: _argument(sim, name, arguments[name], _is_constexpr(function, i), _keeps_one(function, i))
            for i, name in enumerate(function.arg_names)
        }
        body = rewritten(function.fn)
        sim.body = lambda: body(**values)
        sim.pending.extend(_clusters(sim.grid, sim.cluster_shape))
        try:
            sim.execute(resident)
        except Exception as error:
            raise _located(error, sim.scheduler.operation) from error
    sim.run.seconds = time.perf_counter() - began
    return sim.run


def _located(error: Exception, operation: Operation | None) -> KernelError:
    """What went wrong while a kernel's code was carried out, and at which of its lines."""
    where = places.place(operation.where) if operation else places.of_traceback(error.__traceback__)
    what = str(error) if isinstance(error, KernelError) else f"{type(error).__name__}: {message_of(error)}"
    return KernelError(f"{what}\n    at {where}")


def simulate(
    kernel: Any,
    grid: Grid,
    args: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
    *,
    arch: str = "sm_90",
    seeds: int | Iterable[int] = 3,
    policies: Iterable[Policy] = POLICIES,
    check: Callable[[], object] | None = None,
    stop_at_first: bool = False,
    **options: Any,
) -> Report:
    """Run a kernel under every seed and policy, with the tensors as they were before each run.

    ``check`` is called after each run that found nothing and raises, or returns False, if the results are wrong. After
    the last run the tensors hold its results. ``options`` go to :func:`launch`.
    """
    kwargs = kwargs or {}
    report = Report(_name(kernel), arch)
    tensors = [value for value in _flat((*args, *kwargs.values())) if isinstance(value, torch.Tensor)]
    before = [tensor.detach().clone() for tensor in tensors]
    for seed, policy in schedules(seeds, policies):
        with torch.no_grad():
            for tensor, value in zip(tensors, before, strict=True):
                tensor.copy_(value)
        run = launch(kernel, grid, *args, arch=arch, seed=seed, policy=policy, **options, **kwargs)
        if check is not None and run.ok:
            run.findings += checked(check, run)
        report.runs.append(run)
        if stop_at_first and not run.ok:
            break
    return report


def schedules(seeds: int | Iterable[int], policies: Iterable[Policy]) -> list[tuple[int, Policy]]:
    """Every seed with every policy. Raises ValueError if there are none: nothing found would mean nothing."""
    names: Any = (policies,) if isinstance(policies, str) else policies
    made = list(itertools.product(range(seeds) if isinstance(seeds, int) else seeds, names))
    if not made:
        raise ValueError("seeds, policies: expected at least one of each")
    return made


def checked(check: Callable[[], object], run: Run) -> list[Finding]:
    """What a caller's check says about the results.

    Raises:
        TargetError: it returns something else than None, True or False, of which one cannot tell whether it is a no.
    """
    try:
        verdict = check()
    except AssertionError as error:
        return [
            Finding("wrong-result", message_of(error).strip() or "the check failed", seed=run.seed, policy=run.policy)
        ]
    if verdict is False:
        return [Finding("wrong-result", "the check returned False", seed=run.seed, policy=run.policy)]
    if verdict is not None and verdict is not True:
        raise TargetError(
            f"{defined(check)} returned a value of type {type(verdict).__name__}: expected None, True, or False if the "
            "results are wrong"
        )
    return []


def resolve(
    kernel: Any, args: Sequence[Any], kwargs: dict[str, Any], config: int | Callable[[Any], bool] = 0
) -> tuple[JITFunction, dict[str, Any], dict[str, Any]]:
    """The function below autotuners and heuristics, its arguments by name, and the launch options."""
    options: dict[str, Any] = {}
    kwargs = dict(kwargs)
    while not isinstance(kernel, JITFunction):
        names = getattr(kernel, "arg_names", ())
        if isinstance(kernel, Autotuner):
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            chosen = _configuration(kernel, given, config)
            if chosen.pre_hook is not None:
                chosen.pre_hook({**given, **chosen.all_kwargs()})
            kwargs = {**kwargs, **chosen.all_kwargs()}
        elif isinstance(kernel, Heuristics):
            for name, heuristic in kernel.values.items():
                kwargs[name] = heuristic({**dict(zip(names, args, strict=False)), **kwargs})
        elif type(kernel).__name__ == "InterpretedFunction":
            raise KernelError(INTERPRETED)
        else:
            raise TypeError(f"kernel: expected a @triton.jit function, got {type(kernel).__name__}")
        kernel = kernel.fn
    options = {name: value for name, value in kwargs.items() if name not in kernel.arg_names}
    unknown = sorted(options.keys() - CUDAOptions.__dataclass_fields__.keys())
    if unknown:
        raise KernelError(f"{kernel.fn.__name__} has no argument {unknown[0]}, and neither is it a launch option")
    given = {name: value for name, value in kwargs.items() if name in kernel.arg_names}
    bound = kernel.signature.bind(*args, **given)
    bound.apply_defaults()
    return kernel, dict(bound.arguments), options


def _configuration(kernel: Autotuner, given: dict[str, Any], config: int | Callable[[Any], bool]) -> Any:
    configs = kernel.configs
    if len(configs) > 1:
        kernel.nargs = {name: value for name, value in given.items() if name in kernel.arg_names}
        configs = kernel.prune_configs(dict(given))
    if callable(config):
        matching = [candidate for candidate in configs if config(candidate)]
        if not matching:
            raise ValueError(f"config: none of the {len(configs)} configurations is wanted")
        return matching[0]
    return numbered(configs, config, f"with these arguments {_name(kernel)}")


def numbered(usable: Sequence[Any], number: int, kernel: str) -> Any:
    """The configuration of this number, among those that ``kernel`` has. Raises TargetError with the range."""
    if not 0 <= number < len(usable):
        raise TargetError(f"configuration {number}: {kernel} has those from 0 to {len(usable) - 1}")
    return usable[number]


@functools.cache
def _uses_clc(function: Callable[..., Any]) -> bool:
    return "clc_" in inspect.getsource(function)


def _three(extents: Sequence[int]) -> tuple[int, int, int]:
    x, y, z = (*(int(n) for n in extents), 1, 1, 1)[:3]
    return x, y, z


def _clusters(grid: tuple[int, int, int], shape: tuple[int, int, int]) -> list[tuple[int, int, int]]:
    if any(n % c for n, c in zip(grid, shape, strict=True)):
        raise KernelError(f"a grid of {grid} is no multiple of the cluster {shape}")
    xs, ys, zs = (range(0, n, c) for n, c in zip(grid, shape, strict=True))
    return [(x, y, z) for z in zs for y in ys for x in xs]


def _name(kernel: Any) -> str:
    while hasattr(kernel, "fn"):
        kernel = kernel.fn
    return str(getattr(kernel, "__name__", kernel))


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _flat(value)
        elif isinstance(value, TensorDescriptor):
            yield value.base
        else:
            yield value


# Arguments -----------------------------------------------------------------------------------------------------------


def _is_constexpr(function: JITFunction, index: int) -> bool:
    return bool(function.params[index].is_constexpr)


def _keeps_one(function: JITFunction, index: int) -> bool:
    return bool(function.params[index].do_not_specialize)


def _argument(sim: Machine, name: str, value: Any, constexpr: bool, keeps_one: bool) -> Any:
    """What a kernel sees of an argument: pointers, descriptors and scalars of the GPU; constants stay what they are."""
    if constexpr or value is None or isinstance(value, (str, tl.dtype, JITFunction)):
        return value.value if isinstance(value, tl.constexpr) else value
    if isinstance(value, (tuple, list)):
        return tuple(_argument(sim, f"{name}[{i}]", element, False, keeps_one) for i, element in enumerate(value))
    if isinstance(value, TensorDescriptor):
        return _descriptor(sim, name, value)
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            raise KernelError(f"{name}: expected a tensor on the CPU, got one on {value.device}")
        sim.globals.register(name, value)
        if value.dtype == torch.int64 and value.numel() and int(value.max()) >= 2**32:
            _register_addressed(sim, name, value)
        return pointer(value)
    if isinstance(value, bool):
        return semantic.to_tensor(value)
    if isinstance(value, int):
        if value == 1 and not keeps_one:  # the JIT compiles for it
            return 1
        return int32(value) if -(2**31) <= value < 2**31 else semantic.to_tensor(value)
    if isinstance(value, float):
        return tl.tensor(TensorHandle(np.array([value], np.float32), tl.float32), tl.float32)
    return value


def _register_addressed(sim: Machine, name: str, addresses: torch.Tensor) -> None:
    """Tensors whose addresses are in an argument: kernels may make pointers of them."""
    wanted = set(addresses.flatten().tolist())
    for found in gc.get_objects():
        if type(found) is torch.Tensor and found.device.type == "cpu" and found.data_ptr() in wanted:
            sim.globals.register(f"*{name}", found)


def pointer(tensor: torch.Tensor) -> tl.tensor:
    element = triton_type(tensor.dtype)
    type_ = tl.pointer_type(element)
    return tl.tensor(TensorHandle(np.array([tensor.data_ptr()], np.uint64), type_), type_)


def triton_type(dtype: torch.dtype) -> tl.dtype:
    names = {
        torch.float32: tl.float32,
        torch.float16: tl.float16,
        torch.bfloat16: tl.bfloat16,
        torch.float64: tl.float64,
        torch.float8_e4m3fn: tl.float8e4nv,
        torch.float8_e5m2: tl.float8e5,
        torch.bool: tl.int1,
        **{getattr(torch, name): getattr(tl, name) for name in ("int8", "int16", "int32", "int64", "uint8")},
    }
    return names[dtype]


def _descriptor(sim: Machine, name: str, value: TensorDescriptor) -> tl.tensor_descriptor:
    base = value.base
    sim.globals.register(name, base)
    element = triton_type(base.dtype)
    block = [int(n) for n in value.block_shape]
    shape, strides = tuple(int(n) for n in value.shape), tuple(int(n) for n in value.strides)
    handle = Descriptor(base.data_ptr(), element, shape, strides, tuple(block), value.padding == "nan")
    handle.check()
    return tl.tensor_descriptor(
        handle,
        [int32(n) for n in shape],
        [semantic.make_scalar(n, tl.int64) for n in strides],
        tl.block_type(element, block),
    )


# Patches -------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def simulated_language() -> Iterator[None]:
    """The one thing that front ends do differently: a type's IR is the type itself, with its signedness."""
    original = tl.dtype.to_ir

    def to_ir(self: Any, builder: Any) -> Any:
        return self if builder is semantic.builder else original(self, builder)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with mock.patch.object(tl.dtype, "to_ir", to_ir), np.errstate(all="ignore"):
            yield
    finally:
        torch.set_num_threads(threads)
