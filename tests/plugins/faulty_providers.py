"""Providers that go wrong in every way that a sweep must survive, as another installed package would bring them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jfabench.operator import Call, Unavailable, load_providers


def _reference(inputs: Any, direction: Any) -> Call:
    return load_providers("jagged_attention").by_name["reference"].prepare(inputs, direction)


def _changed(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[Any, Any], Call]:
    def prepare(inputs: Any, direction: Any) -> Call:
        call = _reference(inputs, direction)
        return Call(call.run, lambda raw: change(dict(call.results(raw))))

    return prepare


def _instead(action: Callable[[], Any]) -> Callable[[Any, Any], Call]:
    def prepare(inputs: Any, direction: Any) -> Call:
        call = _reference(inputs, direction)
        return Call(action, call.results)

    return prepare


def _unwritten(inputs: Any, direction: Any) -> Call:
    """Writes all rows but the last of every result into memory that it took uninitialised."""
    import torch

    call = _reference(inputs, direction)

    def run() -> Any:
        partial = {}
        for name, tensor in call.results(call.run()).items():
            partial[name] = torch.empty_like(tensor)
            partial[name].view(-1)[:-1] = tensor.reshape(-1)[:-1]
        return partial

    return Call(run, lambda raw: raw)


def _after_check(action: Callable[[], Any]) -> Callable[[Any, Any], Call]:
    """Right when it is checked, then goes wrong while it is timed."""

    def prepare(inputs: Any, direction: Any) -> Call:
        call = _reference(inputs, direction)
        calls = 0

        def run() -> Any:
            nonlocal calls
            calls += 1
            if calls > 3:
                action()
            return call.run()

        return Call(run, call.results)

    return prepare


def _memo(inputs: Any, direction: Any) -> Call:
    """Computes once and hands out the same results for ever."""
    call = _reference(inputs, direction)
    kept: list[Any] = []

    def run() -> Any:
        if not kept:
            kept.append(dict(call.results(call.run())))
        return kept[0]

    return Call(run, lambda raw: raw)


def _wobbles(inputs: Any, direction: Any) -> Call:
    """Right, but one value of `out` differs by its last bit from call to call."""
    import torch

    call = _reference(inputs, direction)
    calls = 0

    def results(raw: Any) -> dict[str, Any]:
        nonlocal calls
        calls += 1
        found = dict(call.results(raw))
        found["out"].view(torch.int16).view(-1)[0] ^= calls & 1
        return found

    return Call(call.run, results)


def _accumulates(inputs: Any, direction: Any) -> Call:
    """Right the first time, but adds to what it computed before."""
    call = _reference(inputs, direction)
    sums: dict[str, Any] = {}

    def run() -> Any:
        for name, tensor in call.results(call.run()).items():
            sums[name] = tensor.clone() if name not in sums else sums[name].nan_to_num(0.0) + tensor * (name == "lse")
        return dict(sums)

    return Call(run, lambda raw: raw)


def _mutates(inputs: Any, direction: Any) -> Call:
    call = _reference(inputs, direction)

    def run() -> Any:
        result = call.run()
        inputs.k.mul_(2)
        return result

    return Call(run, call.results)


def _leaves_no_grad(inputs: Any, direction: Any) -> Call:
    import torch

    torch.set_grad_enabled(False)
    return _reference(inputs, direction)


def _raise() -> None:
    raise RuntimeError("planted failure")


def _allocate() -> Any:
    import torch

    return torch.ones(1 << 50, dtype=torch.uint8)


def _print_and_exit() -> None:
    print("last words of the provider", flush=True)
    os._exit(7)


@dataclass(frozen=True)
class Faulty:
    name: str
    make: Callable[[Any, Any], Call]
    asked: Callable[[], None] = lambda: None
    operator: str = "jagged_attention"
    summary: str = "goes wrong on purpose"

    def unavailable(self, device: str) -> Unavailable | None:
        return None

    def unsupported(self, params: Any, direction: Any) -> str | None:
        self.asked()
        return None

    def prepare(self, inputs: Any, direction: Any) -> Call:
        return self.make(inputs, direction)


def _raise_import_error() -> None:
    raise ImportError("libfaulty.so: undefined symbol")


def _change_settings() -> None:
    import torch

    torch.set_grad_enabled(False)


def _exit_at_once() -> None:
    os._exit(7)


@dataclass(frozen=True)
class FaultyImport(Faulty):
    """Right, but something goes wrong when its library is imported ahead."""

    make: Callable[[Any, Any], Call] = _reference
    load: Callable[[], None] = lambda: None

    def preload(self) -> None:
        self.load()


PROVIDERS = (
    FaultyImport("import_raises", load=_raise_import_error),
    FaultyImport("import_exits", load=_exit_at_once),
    FaultyImport("import_sets", load=_change_settings),
    Faulty("raises", _instead(_raise)),
    Faulty("wobbles", _wobbles),
    Faulty("raises_when_asked", _reference, asked=_raise),
    Faulty("memo", _memo),
    Faulty("accumulates", _accumulates),
    Faulty("mutates", _mutates),
    Faulty("no_call", lambda inputs, direction: None),  # type: ignore[arg-type,return-value]
    Faulty("leaves_no_grad", _leaves_no_grad),
    Faulty("raises_late", _after_check(_raise)),
    Faulty("wrong", _changed(lambda results: {name: -tensor for name, tensor in results.items()})),
    Faulty("nan", _changed(lambda results: {name: tensor * float("nan") for name, tensor in results.items()})),
    Faulty("unwritten", _unwritten),
    Faulty("nothing", _changed(lambda results: {})),
    Faulty("sleeps", _instead(lambda: time.sleep(3600))),
    Faulty("sleeps_late", _after_check(lambda: time.sleep(3600))),
    Faulty("exits", _instead(_print_and_exit)),
    Faulty("exits_late", _after_check(_print_and_exit)),
    Faulty("segfaults", _instead(lambda: os.kill(os.getpid(), signal.SIGSEGV))),
    Faulty("killed", _instead(lambda: os.kill(os.getpid(), signal.SIGKILL))),
    Faulty("allocates", _instead(_allocate)),
    Faulty("slow", _after_check(lambda: time.sleep(0.3))),
)
