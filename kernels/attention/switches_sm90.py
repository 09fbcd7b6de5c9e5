"""What each stage of the Hopper kernels costs: variants that leave one out. Their results are wrong by design.

A variant does as many steps as the kernel, waits for what it waits for, and computes with numbers of the same size, so
that a difference in time is the stage's: what the rest does not hide. It is no bound: without one stage another may
come to be what all wait for.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from .rewrite import Body, Edit, Swap, variant
from .softmax import SLACK


@dataclass(frozen=True)
class Switch:
    """A stage that can be left out of ``kernel``: ``name`` is what is missing then, ``text`` says what is done instead.

    It is made by ``edits`` of the kernel's module, or by other ``options`` of the launch; these may make ``unused``
    arguments None. It means something for launches whose options include ``only``.
    """

    kernel: str
    name: str
    text: str
    edits: tuple[Edit, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    only: Mapping[str, Any] = field(default_factory=dict)

    def serves(self, options: Mapping[str, Any]) -> bool:
        """Whether a launch with these options has the stage."""
        return all(options.get(name) == value for name, value in self.only.items())

    def made(self) -> Any:
        """The kernel without the stage. Raises :class:`.rewrite.StaleEditError`."""
        return getattr(_module(MODULES[self.kernel], self.edits), self.kernel)


@functools.cache
def _module(name: str, edits: tuple[Edit, ...]) -> ModuleType:
    """Once for each variant, so that it is compiled once."""
    module = importlib.import_module(f".{name}", __package__)
    return variant(module, edits) if edits else module


MODULES = {"forward_sm90_kernel": "fwd_sm90", "backward_sm90_kernel": "bwd_sm90"}

_SOFTMAX = ("scores", "peak", "scale_log2", "GUARDED", "LAZY")


def _load_once(ring: str) -> str:
    """Statements in place of ``ring.load``: the first rounds fill the ring, later ones find the old tiles there."""
    return f"""
        if {{0}} < {ring}.depth:
            {ring}.load({{0}}, {{1}}, {{2}}, {{3}}, {{4}})
        else:
            tlx.barrier_arrive({ring}.full[{{0}} % {ring}.depth], 1)
        """


_NO_SOFTMAX = Body(
    "online_softmax",
    _SOFTMAX,
    "return tl.maximum(scores * scale_log2, -8.0), peak, tl.full([scores.shape[0]], 1.0, tl.float32)",
)
_NO_MASK = Body("_mask", ("scores",), "return scores")
_NO_OUTPUT = (
    # The assembler crashes where this store is missing, so that it is never made instead: `rows` is not negative.
    Swap("_finish", "tlx.async_descriptor_store", "if rows < 0:\n    tlx.async_descriptor_store({0}, {1}, {2})"),
    Swap("_finish", "tl.store"),
)
_NO_KEYS = (
    Swap("_load", "buffers.k.load", _load_once("buffers.k")),
    Swap("_load_values", "buffers.v.load", _load_once("buffers.v")),
)

_NO_EXP2 = Swap("_probabilities", "tl.exp2", "tl.maximum({0}, -8.0)")
_NO_GUARD = (
    Swap("_probabilities", "tl.minimum", "{0}"),
    Swap("_probabilities", "_minus_infinity_if_negative", "0.0"),
)
_NO_ADD = Swap("_add_dq", "tlx.async_descriptor_store")
_NO_EXCHANGE = (
    Swap("_step", "me.write_ds"),
    Swap("_step", "me.announce_ds"),
    Swap("_step", "me.await_other"),
    Swap("_consume", "me.await_other"),
)
_NO_GRADIENTS = (Swap("_store", "tlx.async_descriptor_store"),)


def _forward(name: str, text: str, *edits: Edit) -> Switch:
    return Switch("forward_sm90_kernel", name, text, edits)


def _backward(name: str, text: str, *edits: Edit, only: Mapping[str, Any] | None = None) -> Switch:
    return Switch("backward_sm90_kernel", name, text, edits, only=only or {})


_DQ = {"ADD_DQ": True}

SWITCHES = (
    _forward(
        "no exponentials",
        "maximum and rescaling stay, exponents go on as probabilities",
        Body(
            "online_softmax",
            _SOFTMAX,
            f"""
            top = tl.max(scores, 1) * scale_log2
            new_peak = tl.where(top > peak + {SLACK.value}, top, peak) if LAZY else tl.maximum(peak, top)
            anchor = tl.where(new_peak == NEG_INF, 0.0, new_peak) if GUARDED else new_peak
            decay = tl.maximum(peak - anchor, -1.0) * 1e-6 + 1.0
            return tl.maximum(scores * scale_log2 - anchor[:, None], -8.0), new_peak, decay
            """,
        ),
    ),
    _forward(
        "no softmax", "scores go on as probabilities: no maximum or exponential, and nothing to rescale", _NO_SOFTMAX
    ),
    _forward("no mask", "keys beyond the end count", _NO_MASK),
    _forward("no store of out and lse", "out is rounded and staged, and stays there", *_NO_OUTPUT),
    _forward("no loads of K and V", "the first blocks are used over and over", *_NO_KEYS),
    _forward(
        "all left out",
        "all of the above at once",
        *(_NO_SOFTMAX, _NO_MASK, *_NO_OUTPUT, *_NO_KEYS),
    ),
    _backward("no exponentials", "exponents go on as probabilities", _NO_EXP2),
    _backward("no mask", "keys beyond a window count, and absent keys are not guarded against", *_NO_GUARD),
    _backward("no addition of dQ", "dQ is computed and staged, and stays there", _NO_ADD, only=_DQ),
    _backward(
        "no exchange of dS", "dQ is of what is in the buffers, and the consumers do not wait", *_NO_EXCHANGE, only=_DQ
    ),
    Switch(
        "backward_sm90_kernel",
        "no dQ",
        "neither exchange, matmul nor addition",
        options={"ADD_DQ": False},
        unused=("dq",),
        only=_DQ,
    ),
    _backward("no stores of dK and dV", "they are rounded and staged, and stay there", *_NO_GRADIENTS),
    _backward(
        "all left out",
        "all of the above at once, but for the matmul of dQ",
        *(_NO_EXP2, *_NO_GUARD, _NO_ADD, *_NO_EXCHANGE, *_NO_GRADIENTS),
        only=_DQ,
    ),
)
