"""The project's own attention kernels on the simulator, through their public function, against an oracle."""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from jfabench.kernels.attention.api import HEAD_DIMS

from . import fakes
from .host import simulate_calls
from .launching import numbered
from .machine import Target
from .report import Report
from .scheduler import POLICIES, Policy

PACKAGE = "jfabench.kernels.attention"
KERNELS = {"fwd": "forward", "bwd": "backward"}  # what the names of modules and kernels begin with
KERNEL = "for this case the kernel"  # how a sentence on its configurations calls it
MOST_VALUES = 2**27  # of inputs and scores: half a GiB in float32, far more than anyone would wait for
TOLERANCE = 0.02  # absolute and relative: bfloat16 has 8 bits, and P, dS and the results are rounded to it


@dataclass(frozen=True)
class Case:
    """A problem: keys of each sequence; as many queries, or ``queries`` that all sequences share.

    Raises:
        ValueError: a value that no problem has, or one too large to be simulated; the message names the field.
    """

    keys: tuple[int, ...]
    queries: int | None = None
    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 128
    causal: bool = False
    window: tuple[int, int] = (-1, -1)

    def __post_init__(self) -> None:
        keys = f"keys={':'.join(map(str, self.keys))}"
        if min(self.keys, default=0) < 0:
            raise ValueError(f"{keys}: expected numbers of at least 0")
        if sum(self.keys) == 0:
            raise ValueError(f"{keys}: expected a key at least, for without any no kernel is launched")
        for name in ("queries", "heads", "kv_heads"):
            count = getattr(self, name)
            if count is not None and count < 1:
                raise ValueError(f"{name}={count}: expected at least 1")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads}: expected a multiple of kv_heads={self.kv_heads}")
        if self.head_dim not in HEAD_DIMS:
            raise ValueError(f"D={self.head_dim}: expected {' or '.join(map(str, HEAD_DIMS))}")
        if min(self.window) < -1:
            raise ValueError(f"window={self.window[0]}:{self.window[1]}: expected -1 (no bound) or more on each side")
        queries = self.keys if self.queries is None else (self.queries,) * len(self.keys)
        values = sum(q * k + self.head_dim * (q + k) for q, k in zip(queries, self.keys, strict=True)) * self.heads
        if values > MOST_VALUES:
            raise ValueError(
                f"keys, queries, heads: {values:,} scores and elements of q, k and v are more than the {MOST_VALUES:,} "
                "that can be simulated: take fewer or shorter sequences"
            )

    @classmethod
    def parse(cls, text: str) -> Case:
        """One of :data:`CASES`, or fields: ``keys=100:37,queries=64,heads=4,kv_heads=2,D=64,causal,window=3:5``.

        Raises ValueError with the field that is not valid.
        """
        if text in CASES:
            return CASES[text]
        values: dict[str, Any] = {}
        for word in text.split(","):
            name, value = _field(word)
            if name in values:
                raise ValueError(f"{word!r}: this field stands twice in {text!r}; give it once")
            values[name] = value
        if "keys" not in values:
            raise ValueError(f"{text!r} lacks the keys of each sequence: add them, such as keys=100:37")
        return cls(**values)


def _field(word: str) -> tuple[str, Any]:
    """A field of a case and its value: ``keys=100:37``. Raises ValueError."""
    name, equals, value = word.partition("=")
    name = {"D": "head_dim"}.get(name, name)
    if name not in Case.__dataclass_fields__:
        raise ValueError(f"{word!r} is neither a case ({', '.join(CASES)}) nor one of its fields")
    if name == "causal":
        if equals:
            raise ValueError(f"{word!r}: causal takes no value; leave it out where all keys are seen")
        return name, True
    numbers = value.split(":")
    if not all(re.fullmatch("-?[0-9]{1,9}", number) for number in numbers):
        raise ValueError(f"{word!r}: expected numbers, such as keys=100:37, D=64, window=3:5")
    found = tuple(map(int, numbers))
    if name == "keys":
        return name, found
    if name == "window":
        if len(found) != 2:
            raise ValueError(f"{word!r}: expected two numbers, to the left and to the right, such as window=3:5")
        return name, found
    if len(found) != 1:
        raise ValueError(f"{word!r}: expected one number; only keys and window have several")
    return name, found[0]


CASES = {
    "broadcast": Case(keys=(200, 37, 300), queries=256, heads=2, kv_heads=2),
    "packed": Case(keys=(100, 1, 200)),
    "causal": Case(keys=(150, 70), causal=True),
    "window": Case(keys=(210, 64), window=(30, 10)),
    "grouped": Case(keys=(140, 90), heads=4, kv_heads=2, head_dim=64),
    "empty": Case(keys=(0, 130, 0), queries=64, head_dim=64),
}


def simulate_attention(
    case: Case,
    direction: str = "fwd",
    arch: str = "sm_90",
    *,
    seeds: int | Iterable[int] = 3,
    policies: Iterable[Policy] = POLICIES,
    configuration: int = 0,
    multiprocessors: int = 2,
    **options: Any,
) -> Report:
    """Run one direction of the public attention function under every seed and policy, and compare with the oracle.

    Only the kernel of that direction gets an adversarial schedule. ``configuration`` is one of its configurations by
    number, which it has to have. ``options`` go to :func:`.host.simulated_gpu`.
    """
    inputs, expected = problem(case, direction)
    prefix = KERNELS[direction]

    def choose(kind: Any, usable: tuple[Any, ...]) -> Any:
        return numbered(usable, configuration, KERNEL) if kind.kernel == prefix else usable[0]

    def check() -> None:
        found = attention(case, inputs, direction)
        for name, actual, wanted in zip(("out", "dq", "dk", "dv")[-len(found) :], found, expected, strict=True):
            message = functools.partial("{}: {}".format, name)
            torch.testing.assert_close(actual.float(), wanted, atol=TOLERANCE, rtol=TOLERANCE, msg=message)

    return simulate_calls(
        check,
        arch=arch,
        seeds=seeds,
        policies=policies,
        name=f"{prefix}_{arch.replace('_', '')}",
        within=functools.partial(attention_on, multiprocessors=multiprocessors, choose=choose),
        kernels=lambda name: name.startswith(prefix),
        **options,
    )


def problem(case: Case, direction: str) -> tuple[list[Tensor], Sequence[Tensor]]:
    """``q, k, v, dout`` in bfloat16 and what should come out of them: ``[out]``, or ``[dq, dk, dv]``, in float32."""
    generator = torch.Generator().manual_seed(0)
    total = sum(case.keys)
    rows = total if case.queries is None else case.queries * len(case.keys)

    def values(count: int, heads: int) -> Tensor:
        return torch.randn(count, heads, case.head_dim, generator=generator).bfloat16()

    q = values(total if case.queries is None else case.queries, case.heads)
    inputs = [q, values(total, case.kv_heads), values(total, case.kv_heads), values(rows, case.heads)]
    exact = [tensor.float().requires_grad_() for tensor in inputs[:3]]
    out = oracle(case, *exact)
    if direction == "fwd":
        return inputs, [out.detach()]
    return inputs, torch.autograd.grad(out, exact, inputs[3].float())


def oracle(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention sequence by sequence, ``[rows, heads, D]``; rows without keys are zero."""
    ends = torch.tensor([0, *case.keys]).cumsum(0).tolist()
    outputs = []
    left, right = case.window[0], 0 if case.causal else case.window[1]
    for start, end in itertools.pairwise(ends):
        queries = q[start:end] if case.queries is None else q
        keys, values = (x[start:end].repeat_interleave(case.heads // case.kv_heads, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * case.head_dim**-0.5
        position = torch.arange(len(queries))[:, None] + len(keys) - len(queries)
        distance = torch.arange(len(keys))[None, :] - position
        seen = torch.ones_like(distance, dtype=torch.bool)
        if left >= 0:
            seen &= distance >= -left
        if right >= 0:
            seen &= distance <= right
        weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1)
        weights = torch.where(seen.any(-1, keepdim=True), weights, 0.0) if len(keys) else scores
        outputs.append(torch.einsum("hqk,khd->qhd", weights, values))
    return torch.cat(outputs)


def attention(case: Case, inputs: list[Tensor], direction: str) -> list[Tensor]:
    """``[out]`` or ``[dq, dk, dv]`` of the public function."""
    from jfabench.kernels import jagged_flash_attention

    offsets = torch.tensor([0, *case.keys]).cumsum(0)
    q, k, v = (tensor.detach().requires_grad_(direction == "bwd") for tensor in inputs[:3])
    out = jagged_flash_attention(
        q, k, v, offsets, broadcast_q=case.queries is not None, causal=case.causal, window=case.window
    )
    assert isinstance(out, Tensor)
    return [out] if direction == "fwd" else list(torch.autograd.grad(out, (q, k, v), inputs[3]))


@contextlib.contextmanager
def attention_on(
    arch: str,
    *,
    multiprocessors: int = 2,
    choose: Callable[[Any, tuple[Any, ...]], Any] = lambda _kind, usable: usable[0],
) -> Iterator[None]:
    """The public attention function launches the TLX kernels for ``arch``, on CPU tensors.

    Use it inside :func:`simulated_gpu`. ``choose(kind, usable)`` picks a kernel's configuration; by default its first.
    """
    capability = Target(arch).capability
    package = "jfabench.kernels.attention"
    hardware, front = (importlib.import_module(f"{package}.{name}") for name in ("hardware", "launch"))
    module = importlib.import_module(f"{package}.{front.TLX_LAUNCHERS[divmod(capability, 10)]}")
    backward = importlib.import_module(module.backward.__module__)  # perhaps the same
    modules = [module, backward, importlib.import_module(f"{package}.launch_triton")]
    replaced = {
        "multiprocessors": lambda _device: multiprocessors,
        "gpu_name": lambda _device: f"simulated {arch}",
        "shared_memory_limit": lambda _device: fakes.properties(capability).shared_memory_per_block_optin,
        "choose": lambda kind, _gpu, usable, *_: choose(kind, usable),
    }
    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(front, "launcher", return_value=module))
        for target in (hardware, *modules):
            for name, value in replaced.items():
                if hasattr(target, name):
                    patches.enter_context(mock.patch.object(target, name, value))
        yield
