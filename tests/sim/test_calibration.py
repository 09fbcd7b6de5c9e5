"""The simulator against an H200: results that `scripts/calibrate_simulator.py` recorded there, and faults put in."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
RECORDED = ROOT / "tests" / "data" / "simulator_calibration_h200.npz"


def _script() -> Any:
    spec = importlib.util.spec_from_file_location("calibrate_simulator", ROOT / "scripts" / "calibrate_simulator.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


script = _script()


@pytest.fixture(scope="module")
def recorded() -> Iterator[Mapping[str, np.ndarray]]:
    with np.load(RECORDED) as found:
        yield found


@pytest.mark.parametrize("problem", script.PROBLEMS)
def test_results_are_those_of_the_gpu(problem: str, recorded: Mapping[str, np.ndarray]) -> None:
    results, findings = script.simulated(script.PROBLEMS[problem])
    assert not findings
    assert results
    for tensor, value in results.items():
        expected = recorded[f"{problem}/{tensor}"].astype(np.float32)
        # Sums are made in another order, which may round an element the other way: a unit in bfloat16's last place.
        np.testing.assert_allclose(value, expected, rtol=2**-7, atol=2**-9 * np.abs(expected).max(), err_msg=tensor)


@pytest.mark.parametrize(
    ("fault", "kind", "buffer"),
    [
        ("no wait for keys", "race", "k.tiles"),
        ("no release of values", "deadlock", "v.empty"),
        ("no acquiring of keys", "race", "k.tiles"),
    ],
)
def test_a_fault_that_fails_on_the_gpu_is_reported(
    fault: str, kind: str, buffer: str, recorded: Mapping[str, np.ndarray]
) -> None:
    assert json.loads(str(recorded["told"]))["effects"][fault] in (
        "hang",
        "wrong",
        "CUDA error: unspecified launch failure",
    )
    with script.with_fault(script.FAULTS[fault]) as path:
        _, findings = script.simulated(lambda device: {"out": script.outputs(device, [700, 600, 500, 400])})
        first = findings[0]
        assert first.kind == kind
        assert buffer in f"{first.buffer} {first.message}"
        # The places lead to the loop that misses the line, in the role that it stands in.
        assert any(frame[0] == str(path) for place in first.places for frame in place.frames)
