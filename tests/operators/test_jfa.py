"""The providers of this project's own kernels: what they need, and which kernels they ask for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cases import CASES, complete

import jfabench.kernels
from jfabench.operator import load_providers
from jfabench.operators.jagged_attention import OPERATOR
from jfabench.operators.providers import _machine, jfa

PROVIDERS = load_providers("jagged_attention").by_name
TRITON, TLX = PROVIDERS["triton_jfa"], PROVIDERS["tlx_jfa"]


def triton(folder: Path, *, tlx: bool) -> Path:
    extra = folder / "language" / "extra" / "tlx"
    extra.mkdir(parents=True, exist_ok=True)
    if tlx:
        (extra / "__init__.py").touch()
    return folder


@pytest.mark.parametrize(
    ("tlx", "capability", "device", "reason"),
    [
        (True, (9, 0), "cuda", None),
        (True, None, "cuda", None),  # it cannot be asked: running it will tell
        (True, (10, 0), "cuda", None),
        (True, (8, 0), "cuda", "compute capability 8.0"),
        (False, (9, 0), "cuda", "no TLX"),
        (True, (9, 0), "cpu", "NVIDIA GPUs only"),
    ],
)
def test_tlx_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    tlx: bool,
    capability: tuple[int, int] | None,
    device: str,
    reason: str | None,
) -> None:
    monkeypatch.setattr(jfa, "triton_folder", lambda: triton(tmp_path, tlx=tlx))
    monkeypatch.setattr(_machine, "compute_capability", lambda: capability)
    missing = TLX.unavailable(device)
    assert TRITON.unavailable(device) is None
    if reason is None:
        assert missing is None
    else:
        assert missing is not None
        assert reason in missing.why
        assert missing.remedy


def test_without_triton_there_is_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jfa, "triton_folder", lambda: None)
    for provider in (TRITON, TLX):
        assert "pip install fbtriton" in str(provider.unavailable("cuda"))


@pytest.mark.parametrize(("name", "kernels"), [("triton_jfa", "triton"), ("tlx_jfa", "tlx")])
def test_each_asks_for_its_kernels(monkeypatch: pytest.MonkeyPatch, name: str, kernels: str) -> None:
    asked: list[dict[str, Any]] = []

    def attention(q: Any, k: Any, v: Any, k_offsets: Any, **options: Any) -> Any:
        asked.append(options)
        return q, q

    monkeypatch.setattr(jfabench.kernels, "jagged_flash_attention", attention)
    params = OPERATOR.parse(complete(CASES["window"]))
    inputs = OPERATOR.make_inputs(params, 0, "cpu")
    PROVIDERS[name].prepare(inputs, "fwd").run()
    (options,) = asked
    assert options["kernels"] == kernels
    assert options["window"] == params.window
    assert options["sm_scale"] == inputs.sm_scale
