"""Which kernels serve which device, and how the user learns of it. No kernel runs here."""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from jfabench.kernels import jagged_flash_attention
from jfabench.kernels.attention import launch, notice
from jfabench.kernels.attention.ops import jagged_attention, jagged_attention_backward
from jfabench.kernels.attention.problem import make_problem

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Makes the device 0 a GPU of a compute capability, with or without TLX; modules are given by their names."""

    def use(capability: tuple[int, int] = (9, 0), *, tlx: bool = True, interpreted: bool = False) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: "found" if tlx else None)
        monkeypatch.setattr(launch, "is_interpreted", lambda kernel: interpreted)
        monkeypatch.setattr(launch, "_module", lambda name: name)

    launch.launcher.cache_clear()
    notice.say_once.cache_clear()
    yield use
    launch.launcher.cache_clear()
    notice.say_once.cache_clear()


Use = Callable[..., None]


@pytest.mark.parametrize(
    ("given", "kernels", "device", "expected"),
    [
        ({}, "auto", GPU, "launch_sm90"),
        ({}, "tlx", GPU, "launch_sm90"),
        ({}, "triton", GPU, "launch_triton"),
        ({"capability": (10, 0)}, "auto", GPU, "launch_sm100"),
        ({"capability": (10, 0)}, "tlx", GPU, "launch_sm100"),
        ({"capability": (8, 0)}, "auto", GPU, "launch_triton"),
        ({"capability": (10, 0)}, "triton", GPU, "launch_triton"),
        ({"tlx": False}, "auto", GPU, "launch_triton"),
        ({"interpreted": True}, "auto", GPU, "launch_triton"),
        ({"interpreted": True}, "auto", CPU, "launch_triton"),
        ({"interpreted": True}, "triton", CPU, "launch_triton"),
    ],
)
def test_which_family_serves(
    machine: Use, given: dict[str, Any], kernels: str, device: torch.device, expected: str
) -> None:
    machine(**given)
    assert launch.launcher(kernels, device) == expected


@pytest.mark.parametrize(
    ("given", "device", "message"),
    [
        ({"capability": (8, 0)}, GPU, "no TLX kernels for sm_80; using the plain Triton kernels"),
        ({"tlx": False}, GPU, "the installed triton has no TLX, which fbtriton has; using the plain Triton kernels"),
        ({"interpreted": True}, CPU, "the TLX kernels cannot be interpreted; using the plain Triton kernels"),
    ],
)
def test_falling_back_is_said_once(
    machine: Use, caplog: pytest.LogCaptureFixture, given: dict[str, Any], device: torch.device, message: str
) -> None:
    machine(**given)
    with caplog.at_level(logging.WARNING):
        launch.launcher("triton", device)
        assert caplog.records == []  # it was asked for
        for _ in range(2):
            launch.launcher.cache_clear()
            launch.launcher("auto", device)
    assert [record.message for record in caplog.records] == [message]


def test_nothing_is_said_where_tlx_runs(machine: Use, caplog: pytest.LogCaptureFixture) -> None:
    machine()
    with caplog.at_level(logging.INFO):
        launch.launcher("auto", GPU)
    assert caplog.records == []


@pytest.mark.parametrize(
    ("given", "device", "parts"),
    [
        ({"capability": (8, 0)}, GPU, ["no TLX kernels for sm_80", 'kernels="triton"', "a GPU of sm_90"]),
        ({"capability": (12, 0)}, GPU, ["no TLX kernels for sm_120", "a GPU of sm_90 or sm_100"]),
        ({"tlx": False}, GPU, ["has no TLX", "install fbtriton", "doctor --repair"]),
        ({}, CPU, ["NVIDIA GPUs, not on the cpu", "move the tensors to a GPU"]),
        ({"interpreted": True}, CPU, ["cannot be interpreted", "TRITON_INTERPRET"]),
    ],
)
def test_asking_for_tlx_where_it_cannot_run(
    machine: Use, given: dict[str, Any], device: torch.device, parts: list[str]
) -> None:
    machine(**given)
    with pytest.raises(RuntimeError) as caught:
        launch.launcher("tlx", device)
    text = str(caught.value)
    assert text.startswith('jagged_flash_attention: no kernels="tlx" here: ')
    assert text.endswith(".")
    assert "\n" not in text
    assert all(part in text for part in parts)


@pytest.mark.parametrize("kernels", ["auto", "triton"])
def test_the_cpu_without_the_interpreter_is_refused_without_a_word_on_tlx(
    machine: Use, caplog: pytest.LogCaptureFixture, kernels: str
) -> None:
    machine()
    with pytest.raises(RuntimeError, match="runs on CUDA tensors, got cpu"):
        launch.launcher(kernels, CPU)
    assert caplog.records == []


def test_every_architecture_has_its_module() -> None:
    for name in (*launch.TLX_LAUNCHERS.values(), "launch_triton"):
        assert importlib.util.find_spec(f"jfabench.kernels.attention.{name}")


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="compiled device code")
@pytest.mark.parametrize("name", [*launch.TLX_LAUNCHERS.values(), "launch_triton"])
def test_launch_modules_offer_both_directions(name: str) -> None:
    program = (
        f"from jfabench.kernels.attention import {name} as module\n"
        "import inspect\n"
        "from jfabench.kernels.attention.launch import Launcher\n"
        "for name in ('forward', 'backward'):\n"
        "    expected = list(inspect.signature(getattr(Launcher, name)).parameters)[1:]\n"
        "    assert list(inspect.signature(getattr(module, name)).parameters) == expected, name\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter has one configuration")
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("name", ["launch_triton", *launch.TLX_LAUNCHERS.values()])
def test_deterministic_results_come_from_the_default(
    monkeypatch: pytest.MonkeyPatch, name: str, deterministic: bool
) -> None:
    pytest.importorskip("triton.language.extra.tlx")
    module = importlib.import_module(f"jfabench.kernels.attention.{name}")
    timed: list[Any] = []

    def choose(kind: Any, gpu: str, candidates: Any, launch: Any, began: float) -> Any:
        timed.append((kind, gpu, began))
        return candidates[-1]

    monkeypatch.setattr(module, "choose", choose)
    monkeypatch.setattr(module, "shared_memory_limit", lambda device: 227 * 1024)
    monkeypatch.setattr(module, "gpu_name", lambda device: "a GPU")
    x, ends = torch.zeros(9, 2, 64, dtype=torch.bfloat16), torch.tensor([0, 4, 9])
    problem = make_problem(x, x, x, ends, ends, 0.125, (-1, 0), deterministic)
    kind = problem.kind(name.removeprefix("launch_"), "forward")
    chosen = module._choose("forward", problem, lambda config: pytest.fail("launched"))
    assert chosen == module.configs.candidates(kind, 227 * 1024)[0 if deterministic else -1]
    assert timed == ([] if deterministic else [(kind, "a GPU", problem.began)])


def test_the_dispatch_imports_no_kernels_in_tlx() -> None:
    """Upstream triton, without TLX, must do for the others."""
    program = (
        "import sys; sys.modules['triton.language.extra.tlx'] = None\n"
        "from jfabench.kernels.attention import launch, launch_triton, ops\n"
    )
    subprocess.run([sys.executable, "-c", f"import triton\n{program}"], check=True)


# Through torch --------------------------------------------------------------------------------------------------------


class Recorder:
    """A family whose kernels only note that they were called."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.kernels = ""

    def forward(self, problem: Any) -> tuple[Tensor, Tensor]:
        self.calls.append((self.kernels, "forward"))
        rows = problem.sequences.rows
        return problem.q.new_zeros(rows, *problem.q.shape[1:]), torch.zeros(problem.heads, rows)

    def backward(self, problem: Any, out: Tensor, lse: Tensor, dout: Tensor, **need: bool) -> tuple[Tensor, ...]:
        self.calls.append((self.kernels, "backward"))
        return tuple(torch.zeros_like(x) for x in (problem.q, problem.k, problem.v))


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    family = Recorder()

    def launcher(kernels: str, device: torch.device) -> Recorder:
        family.kernels = kernels
        return family

    monkeypatch.setattr(launch, "launcher", launcher)
    return family


@pytest.mark.parametrize("kernels", ["auto", "tlx", "triton", None])
@pytest.mark.parametrize("compiled", [True, False])
def test_the_choice_reaches_forward_and_backward(recorder: Recorder, kernels: str | None, compiled: bool) -> None:
    ends = torch.tensor([0, 4, 9])
    options = {} if kernels is None else {"kernels": kernels}

    def loss(x: Tensor) -> Tensor:
        return jagged_flash_attention(x, x, x, ends, **options).sum()  # type: ignore[union-attr]

    function = torch.compile(loss, fullgraph=True, backend="aot_eager") if compiled else loss
    function(torch.zeros(9, 2, 64, dtype=torch.bfloat16, requires_grad=True)).backward()
    wanted = kernels or "auto"
    assert recorder.calls == [(wanted, "forward"), (wanted, "backward")]


@pytest.mark.usefixtures("recorder")
@pytest.mark.parametrize("kernels", ["tlx", None])
def test_operators_are_registered_with_their_choice(kernels: str | None) -> None:
    x, ends = torch.zeros(9, 2, 64, dtype=torch.bfloat16, requires_grad=True), torch.tensor([0, 4, 9])
    arguments = (x, x.detach(), x.detach(), ends, ends, 0.125, -1, 0, False, *([kernels] if kernels else []))
    torch.library.opcheck(jagged_attention, arguments)
    x = x.detach()
    lse = torch.zeros(2, 9)
    needs = ("tlx", True, True)
    torch.library.opcheck(jagged_attention_backward, (x, x, x, x, x, lse, ends, ends, 0.125, -1, 0, False, *needs))
