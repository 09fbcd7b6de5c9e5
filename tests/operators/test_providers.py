"""Every provider gives right answers, or says why it does not try; adapters hand over the right arguments."""

from __future__ import annotations

import inspect
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import fake_kernels
import pytest
import torch
from cases import CASES, UNEVEN, complete, random_params
from hypothesis import given, settings
from hypothesis import strategies as st

from jfabench.check import poisoned_allocations
from jfabench.operator import Provider, load_providers
from jfabench.operators.jagged_attention import OPERATOR
from jfabench.operators.providers import _machine, fa3, fa4, torch_varlen
from jfabench.records import DIRECTIONS, Direction, TensorCheck

HERE = Path(__file__).parent
PROVIDERS = load_providers("jagged_attention").by_name
ON_CPU = ("reference", "sdpa_padded")


def parse(**params: Any) -> Any:
    return OPERATOR.parse(complete(params))


def checks_of(provider: Provider, inputs: Any, direction: Direction) -> tuple[TensorCheck, ...]:
    """As a worker does it: prepare, call, compare; twice, and what the first call returned is overwritten between them.

    So results must be fresh in every call, views of no input and of nothing that the next call reads.
    """
    expected = OPERATOR.oracle(inputs, [direction])
    call = provider.prepare(inputs, direction)
    with poisoned_allocations():
        first = call.results(call.run())
    checks = OPERATOR.check(first, expected, direction)
    for result in first.values():
        result.fill_(torch.nan)
    with poisoned_allocations():
        second = call.results(call.run())
    return checks + OPERATOR.check(second, expected, direction)


def assert_right(provider: Provider, inputs: Any, without: tuple[str, ...] = ()) -> None:
    before = OPERATOR.fingerprint(inputs)
    for direction in DIRECTIONS:
        if provider.unsupported(inputs.params, direction):
            continue
        checks = checks_of(provider, inputs, direction)
        assert [c.tensor for c in checks] == 2 * [t for t in OPERATOR.tensors[direction] if t not in without]
        assert all(c.passed for c in checks), (provider.name, direction, checks)
    assert OPERATOR.fingerprint(inputs) == before


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("case", CASES)
def test_every_kind_of_case(name: str, case: str) -> None:
    without = () if name == "reference" else ("lse",)
    assert_right(PROVIDERS[name], OPERATOR.make_inputs(parse(**CASES[case]), 1, "cpu"), without)


@settings(deadline=None, max_examples=40)
@given(params=random_params(), seed=st.integers(0, 2**31))
def test_sdpa_on_any_case(params: dict[str, Any], seed: int) -> None:
    assert_right(PROVIDERS["sdpa_padded"], OPERATOR.make_inputs(OPERATOR.parse(params), seed, "cpu"), ("lse",))


def test_triton_under_the_interpreter() -> None:
    """In a process of its own: Triton decides when it is imported whether it interprets."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    cases = ["broadcast", "broadcast-masked", "cross-causal-mqa", "fp16-128"]
    command = [sys.executable, str(HERE / "check_on_cpu.py"), "triton_jfa", *cases]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "4 cases of triton_jfa are right"


# Wrong answers --------------------------------------------------------------------------------------------------------


def damaged(change: Any, direction: Direction = "fwd_bwd") -> dict[str, bool]:
    """Which tensors still pass after `change` has been done to the right results."""
    inputs = OPERATOR.make_inputs(parse(**CASES["broadcast"]), 0, "cpu")
    expected = OPERATOR.oracle(inputs, [direction])
    results = {name: tensor.to(expected.dtypes[name]) for name, tensor in expected.tensors.items()}
    assert all(c.passed for c in OPERATOR.check(results, expected, direction))
    change(results)
    return {c.tensor: c.passed for c in OPERATOR.check(results, expected, direction)}


@pytest.mark.parametrize("name", ["out", "lse", "dq", "dk", "dv"])
def test_wrong_tensors_fail_alone(name: str) -> None:
    def flip(results: Any) -> None:
        results[name] = -results[name]

    def unwritten(results: Any) -> None:
        results[name][-1] = torch.nan

    def swap_heads(results: Any) -> None:
        results[name] = results[name].flip(0 if name == "lse" else 1)

    def lost_row(results: Any) -> None:
        results[name][-1] = 0

    def cut(results: Any) -> None:
        results[name] = results[name][:-1]

    def widen(results: Any) -> None:
        results[name] = results[name].double()

    for change in (flip, unwritten, swap_heads, lost_row, cut, widen):
        passed = damaged(change)
        assert not passed.pop(name), change.__name__
        assert all(passed.values()), change.__name__


def test_gradients_left_per_sequence_fail() -> None:
    def per_sequence(results: Any) -> None:
        results["dq"] = torch.cat([results["dq"]] * 5)

    assert not damaged(per_sequence)["dq"]


def test_a_missing_tensor_is_not_checked() -> None:
    assert list(damaged(lambda results: results.pop("lse"))) == ["out", "dq", "dk", "dv"]


def test_scaling_by_the_wrong_factor_fails() -> None:
    inputs = OPERATOR.make_inputs(parse(**CASES["self"]), 0, "cpu")
    wrong = OPERATOR.make_inputs(parse(**CASES["self"], sm_scale=0.12), 0, "cpu")  # instead of 0.125
    call = PROVIDERS["reference"].prepare(wrong, "fwd_bwd")
    checks = OPERATOR.check(call.results(call.run()), OPERATOR.oracle(inputs, ["fwd_bwd"]), "fwd_bwd")
    assert not any(c.passed for c in checks if c.tensor != "dv")


# Adapters, with stand-ins for the libraries ---------------------------------------------------------------------------

ADAPTED = ["broadcast", "self", "causal", "window", "broadcast-masked", "cross-causal-mqa", "gqa", "fp16-128", "dense"]


@pytest.fixture
def _flash4(monkeypatch: pytest.MonkeyPatch) -> None:
    package, cute = types.ModuleType("flash_attn"), types.ModuleType("flash_attn.cute")
    cute.flash_attn_varlen_func = fake_kernels.flash4_varlen  # type: ignore[attr-defined]
    package.cute = cute  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", cute)
    monkeypatch.delenv("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", raising=False)
    monkeypatch.setattr(fa4, "compute_capability", lambda: (9, 0))


@pytest.mark.usefixtures("_flash4")
@pytest.mark.parametrize("case", ADAPTED)
@pytest.mark.parametrize("name", ["fa4", "fa4_kernel"])
def test_flash4_gets_its_arguments(name: str, case: str) -> None:
    inputs = OPERATOR.make_inputs(parse(**CASES[case], deterministic=True), 0, "cpu")
    assert_right(PROVIDERS[name], inputs)
    assert fake_kernels.seen["deterministic"] is True
    assert fake_kernels.seen["softmax_scale"] == inputs.params.scale
    assert fake_kernels.seen["return_lse"] is True
    assert fake_kernels.seen["q"].shape == inputs.dout.shape


@pytest.mark.usefixtures("_flash4")
def test_flash4_sums_broadcast_gradients_where_it_says() -> None:
    inputs = OPERATOR.make_inputs(parse(**CASES["broadcast"]), 0, "cpu")
    timed = {name: PROVIDERS[name].prepare(inputs, "bwd").run()[0].shape for name in ("fa4", "fa4_kernel")}
    assert timed == {"fa4": (7, 2, 64), "fa4_kernel": (35, 2, 64)}


@pytest.mark.usefixtures("_flash4")
def test_flash4_turns_its_cache_on_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = OPERATOR.make_inputs(parse(**CASES["self"]), 0, "cpu")
    PROVIDERS["fa4"].prepare(inputs, "fwd")
    assert os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] == "1"
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "0")
    PROVIDERS["fa4"].prepare(inputs, "fwd")
    assert os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] == "0"


def test_flash4_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    provider = PROVIDERS["fa4"]
    monkeypatch.setattr(fa4, "version", lambda *names: None)
    assert "not installed" in str(provider.unavailable("cuda"))
    monkeypatch.setattr(fa4, "version", lambda *names: "4.0.0b36")
    monkeypatch.setattr(_machine, "compute_capability", lambda: (7, 5))
    assert "this GPU has compute capability 7.5" in str(provider.unavailable("cuda"))
    monkeypatch.setattr(_machine, "compute_capability", lambda: (9, 0))
    assert provider.unavailable("cuda") is None
    assert "NVIDIA GPUs only" in str(provider.unavailable("cpu"))
    monkeypatch.setattr(fa4, "compute_capability", lambda: (8, 0))
    assert "no backward" in str(provider.unsupported(parse(**CASES["self"]), "bwd"))
    assert provider.unsupported(parse(**CASES["self"]), "fwd") is None


def build_flash3(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, function: str, **flags: bool) -> None:
    """Installs a build of FlashAttention-3 in `folder`, with build flags like the real ones."""
    interface, config = {"fa3_fwd": fa3.BUILDS[1], "source": fa3.BUILDS[0]}[name]
    (folder / f"{interface}.py").write_text(f"from fake_kernels import {function} as flash_attn_varlen_func\n")
    build_flags = {f"FLASHATTENTION_DISABLE_{flag}": value for flag, value in flags.items()}
    (folder / f"{config}.py").write_text(f"CONFIG = {{'build_flags': {build_flags}}}\n")
    monkeypatch.syspath_prepend(folder)
    for module in (interface, config):
        monkeypatch.setitem(sys.modules, module, None)  # so that what the test imports is forgotten after it
        del sys.modules[module]
    monkeypatch.setattr(fa3, "needs_capability", lambda *majors: None)


@pytest.mark.parametrize("function", ["flash3_varlen", "old_flash3_varlen"])
@pytest.mark.parametrize("case", ADAPTED)
def test_flash3_gets_its_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, function: str) -> None:
    build_flash3(tmp_path, monkeypatch, "source", function)
    inputs = OPERATOR.make_inputs(parse(**CASES[case], deterministic=True), 0, "cpu")
    assert_right(PROVIDERS["fa3"], inputs)
    assert fake_kernels.seen["deterministic"] is True
    assert fake_kernels.seen["softmax_scale"] == inputs.params.scale


def test_flash3_backward_of_sequences_without_empties(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_flash3(tmp_path, monkeypatch, "source", "flash3_varlen")
    provider, full = PROVIDERS["fa3"], {"kind": "list", "values": [3, 17, 1]}
    inputs = OPERATOR.make_inputs(parse(lengths=full, broadcast_q=True, q_len=5), 0, "cpu")
    assert all(provider.unsupported(inputs.params, direction) is None for direction in DIRECTIONS)
    assert_right(provider, inputs)
    assert "hang on empty sequences" in str(provider.unsupported(parse(lengths=UNEVEN), "bwd"))


def test_flash3_knows_what_its_build_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    provider = PROVIDERS["fa3"]
    assert "not installed" in str(provider.unavailable("cuda"))
    build_flash3(tmp_path, monkeypatch, "fa3_fwd", "flash3_varlen", BACKWARD=True, FP16=True, LOCAL=True, HDIM64=True)
    assert provider.unavailable("cuda") is None
    assert "NVIDIA GPUs only" in str(provider.unavailable("cpu"))

    def reason(direction: Direction = "fwd", **params: Any) -> str | None:
        return provider.unsupported(parse(**{"lengths": UNEVEN, "head_dim": 128, **params}), direction)

    assert reason() is None
    assert reason(causal=True) is None
    assert reason(window=[-1, 0]) is None
    assert reason("bwd") == "fa3_fwd_interface was built without a backward"
    assert reason("fwd_bwd") == "fa3_fwd_interface was built without a backward"
    assert reason(dtype="fp16") == "fa3_fwd_interface was built without fp16"
    assert reason(window=[4, 0]) == "fa3_fwd_interface was built without windows"
    assert reason(head_dim=64) == "fa3_fwd_interface was built without head_dim 64"


def test_varlen_arguments_are_those_of_this_torch() -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    assert torch_varlen.varlen_arguments() == set(inspect.signature(varlen.varlen_attn).parameters)


@pytest.mark.parametrize("fake", [fake_kernels.torch_varlen, fake_kernels.old_torch_varlen])
@pytest.mark.parametrize("case", ADAPTED)
def test_torch_varlen_gets_its_arguments(monkeypatch: pytest.MonkeyPatch, case: str, fake: Any) -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    monkeypatch.setattr(varlen, "varlen_attn", fake)
    arguments = frozenset(inspect.signature(fake).parameters)
    monkeypatch.setattr(torch_varlen, "varlen_arguments", lambda: arguments)
    inputs = OPERATOR.make_inputs(parse(**CASES[case]), 0, "cpu")
    reason = PROVIDERS["torch_varlen"].unsupported(inputs.params, "fwd")
    old = fake is fake_kernels.old_torch_varlen
    assert (reason is not None) == (old and case in ("window", "broadcast-masked", "cross-causal-mqa", "gqa"))
    assert_right(PROVIDERS["torch_varlen"], inputs)
    if reason is None:
        assert fake_kernels.seen["scale"] == inputs.params.scale


def test_torch_varlen_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    provider = PROVIDERS["torch_varlen"]
    assert "NVIDIA GPUs only" in str(provider.unavailable("cpu"))
    assert "no deterministic backward" in str(provider.unsupported(parse(lengths=UNEVEN, deterministic=True), "bwd"))
    monkeypatch.setattr(torch_varlen, "varlen_arguments", frozenset)
    assert "install torch 2.10" in str(provider.unavailable("cuda"))


def test_a_gpu_that_cannot_be_asked_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_machine, "compute_capability", lambda: None)
    assert _machine.needs_capability(9) is None


# Plug-ins -------------------------------------------------------------------------------------------------------------


def test_names_and_summaries() -> None:
    expected = {"reference", "sdpa_padded", "torch_varlen", "triton_jfa", "tlx_jfa", "fa4", "fa4_kernel", "fa3"}
    assert expected <= set(PROVIDERS)
    for name in expected:
        assert PROVIDERS[name].name == name
        assert len(PROVIDERS[name].summary) > 40
        assert "\n" not in PROVIDERS[name].summary


def test_a_provider_of_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One small file and one entry point, as pip would install them."""
    shutil.copy(HERE / "plugin" / "looped_sdpa.py", tmp_path)
    info = tmp_path / "looped_sdpa-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: looped-sdpa\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[jfabench.providers]\nlooped_sdpa = looped_sdpa\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "looped_sdpa", raising=False)

    found = load_providers("jagged_attention")
    assert found.broken == ()
    provider = found.by_name["looped_sdpa"]
    for case in ("broadcast", "self", "gqa", "all-empty", "one-key-each"):
        inputs = OPERATOR.make_inputs(parse(**CASES[case]), 0, "cpu")
        assert provider.unsupported(inputs.params, "fwd") is None
        assert all(c.passed for c in checks_of(provider, inputs, "fwd"))
    assert provider.unsupported(parse(lengths=UNEVEN), "bwd") == "forward only"
    assert provider.unsupported(parse(lengths=UNEVEN, causal=True), "fwd") == "no masks"
