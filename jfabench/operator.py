"""What an operator and a provider must offer to be measured. Plug-ins implement these; nothing here imports torch.

An *operator* says what is computed: its parameters, inputs, oracle and amount of work. A *provider* is one
implementation of it. A provider is a module (a file in `operators/providers/`, or one that another installed package
names under the entry-point group `jfabench.providers`) with an attribute `PROVIDERS`, a sequence of `Provider` objects.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Protocol, runtime_checkable

from pydantic import BaseModel

from jfabench.records import Case, Direction, TensorCheck, Work

ENTRY_POINT_GROUP = "jfabench.providers"
OPERATOR_MODULES = {"jagged_attention": "jfabench.operators.jagged_attention"}


@dataclass(frozen=True)
class Unavailable:
    """Why a provider cannot run on this machine (one clause), and what to do about it (one sentence or command)."""

    why: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.why}: {self.remedy}"


@dataclass(frozen=True)
class Call:
    """One provider, on given inputs, in one direction.

    `run()` is what is timed: it takes no argument, launches the work, does not synchronise, and returns whatever the
    provider makes. `results(run())`, outside the timed region, names the tensors as the operator's contract does
    (`out`, `lse`, `dq`, ...); a tensor that the provider cannot return is left out and reported as not checked.
    """

    run: Callable[[], Any]
    results: Callable[[Any], Mapping[str, Any]]


class Provider(Protocol):
    """One implementation of an operator.

    Constructing a provider and importing its module must not import torch or touch a GPU: `list` shows every provider
    on every machine.
    """

    @property
    def name(self) -> str: ...

    @property
    def operator(self) -> str:
        """The name of the operator that it implements."""
        ...

    @property
    def summary(self) -> str:
        """One line on what exactly is timed."""
        ...

    def unavailable(self, device: str) -> Unavailable | None:
        """None if the provider can run on `device` (`"cuda"` or `"cpu"`) of this machine."""
        ...

    def unsupported(self, params: Any, direction: Direction) -> str | None:
        """None if the provider computes exactly this case, else the reason why not. Called before anything is built."""
        ...

    def prepare(self, inputs: Any, direction: Direction) -> Call:
        """Does all that must stay outside the timed region (for `bwd`: the forward, too) and returns the call."""
        ...


@runtime_checkable
class Preloading(Protocol):
    """What a provider may offer besides: its library is then imported before any case, and beside other measurements.

    A worker process is prepared while another one measures. What `preload` has done there, no case has to wait for.
    """

    def preload(self) -> None:
        """Imports whatever `prepare` and its call need, and touches no GPU: no context, no tensor on a device.

        Called once in a process, before `prepare`, if the provider is available. Whatever it raises is reported as the
        reason why the provider is unavailable.
        """
        ...


class Expected(Protocol):
    """The oracle's answers. Beyond the tensors it is the operator's own."""

    @property
    def tensors(self) -> Mapping[str, Any]:
        """The right results by name, as torch tensors."""
        ...


class Operator(Protocol):
    """What is computed. `params` below is an instance of the operator's own parameter model."""

    @property
    def name(self) -> str: ...

    @property
    def model(self) -> type[BaseModel]:
        """The pydantic model of its parameters: sweep files are validated against it."""
        ...

    @property
    def tensors(self) -> Mapping[Direction, tuple[str, ...]]:
        """The names of the results of each direction."""
        ...

    def parse(self, params: Mapping[str, Any]) -> Any:
        """Validates and completes a JSON object of parameters. Raises `pydantic.ValidationError`."""
        ...

    def dump(self, params: Any) -> dict[str, Any]:
        """The canonical JSON object of `params`: `parse(dump(p)) == p`."""
        ...

    def label(self, params: Any) -> str:
        """A short name for people, such as `N=1024 fill=0.5 M=256`."""
        ...

    def work(self, params: Any, direction: Direction, seed: int) -> Work:
        """Useful FLOP and minimal bytes, from the true lengths."""
        ...

    def memory(self, params: Any, seed: int) -> int:
        """Bytes of inputs, outputs and gradients together."""
        ...

    def facts(self, params: Any, seed: int) -> dict[str, Any]:
        """What a record keeps about the drawn inputs: hash, sum, maximum of the lengths."""
        ...

    def make_inputs(self, params: Any, seed: int, device: str) -> Any:
        """Fresh random inputs on `device`."""
        ...

    def fingerprint(self, inputs: Any) -> Mapping[str, int]:
        """A checksum of each input tensor, to notice a provider that writes to its inputs. Waits for the device."""
        ...

    def oracle(self, inputs: Any, directions: Sequence[Direction]) -> Expected:
        """The right answers for `directions`, and the tolerance of each tensor."""
        ...

    def check(self, results: Mapping[str, Any], expected: Any, direction: Direction) -> tuple[TensorCheck, ...]:
        """Compares results with the oracle's, one `TensorCheck` for each tensor that the provider returned."""
        ...


def load_operator(name: str) -> Operator:
    """Raises `KeyError` naming the known operators."""
    try:
        module = OPERATOR_MODULES[name]
    except KeyError:
        raise KeyError(f"operator {name!r} is unknown; known: {', '.join(OPERATOR_MODULES)}") from None
    operator: Operator = importlib.import_module(module).OPERATOR
    return operator


def case_facts(operator: Operator, case: Case) -> tuple[Work, dict[str, Any]]:
    """What a record says of a case whatever becomes of it: its work, and facts about its inputs."""
    params = operator.parse(case.params)
    facts = {
        **operator.facts(params, case.seed),
        "label": operator.label(params),
        "memory": operator.memory(params, case.seed),
    }
    return operator.work(params, case.direction, case.seed), facts


@dataclass(frozen=True)
class BrokenPlugin:
    """A provider module that could not be loaded. It is shown by `list`, and never stops the others."""

    name: str
    why: str


def _require_provider(candidate: Any) -> None:
    if isinstance(candidate, type):
        raise TypeError(f"PROVIDERS holds the class {candidate.__name__}; it must hold objects: {candidate.__name__}()")
    for name in ("name", "operator", "summary"):
        if not isinstance(getattr(candidate, name, None), str):
            raise TypeError(f"{candidate!r} has no {name!r} that is a string")
    for name in ("unavailable", "unsupported", "prepare"):
        if not callable(getattr(candidate, name, None)):
            raise TypeError(f"{candidate!r} has no method {name}()")


@dataclass(frozen=True)
class Providers:
    by_name: Mapping[str, Provider]
    broken: tuple[BrokenPlugin, ...]


def load_providers(operator: str) -> Providers:
    """All providers of `operator`: those shipped, then those of installed packages.

    An installed package cannot replace a shipped provider: the second use of a name is reported as broken.
    """
    sources: list[tuple[str, Callable[[], Any]]] = []
    package = importlib.import_module("jfabench.operators.providers")
    for info in sorted(pkgutil.iter_modules(package.__path__), key=lambda info: info.name):
        if not info.name.startswith("_"):
            path = f"{package.__name__}.{info.name}"
            sources.append((path, lambda path=path: importlib.import_module(path)))  # type: ignore[misc]
    sources.extend((entry.value, entry.load) for entry in entry_points(group=ENTRY_POINT_GROUP))

    by_name: dict[str, Provider] = {}
    broken: list[BrokenPlugin] = []
    for source, load in sources:
        try:
            found = tuple(load().PROVIDERS)
            for provider in found:
                _require_provider(provider)
        except (Exception, SystemExit) as error:
            broken.append(BrokenPlugin(source, f"{type(error).__name__}: {error}"))
            continue
        for provider in found:
            if provider.operator != operator:
                continue
            if provider.name in by_name:
                broken.append(BrokenPlugin(source, f"a provider named {provider.name!r} exists already"))
                continue
            by_name[provider.name] = provider
    return Providers(by_name, tuple(broken))
