from __future__ import annotations

import io
import json

import pytest

from jfabench import worker
from jfabench.policy import MeasurePolicy
from jfabench.records import Case
from jfabench.visit import Job, describe_failure, restore_torch_settings, torch_settings
from jfabench.worker import Emitter


class OutOfMemoryError(RuntimeError):
    """Named as torch names its own."""


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RuntimeError("planted"), "failed"),
        (MemoryError(), "oom"),
        (OutOfMemoryError("CUDA out of memory. Tried to allocate 4 GiB"), "oom"),
        (RuntimeError("CUDA error: out of memory"), "oom"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), "oom"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "failed"),
    ],
)
def test_failures_are_classified(error: Exception, status: str) -> None:
    assert describe_failure(error)[0] == status


def test_a_reason_is_one_short_line_that_says_where() -> None:
    try:
        raise ValueError("first line\n   second line " + "x" * 5000)
    except ValueError as error:
        status, reason = describe_failure(error)
    assert status == "failed"
    assert reason.startswith("ValueError: first line second line xxx")
    assert "test_worker.py:" in reason
    assert "\n" not in reason
    assert len(reason) < 800


def test_a_reason_fits_into_any_file() -> None:
    _, reason = describe_failure(ValueError("bad \ud800 \x1b[31m \x00 end"))
    reason.encode("utf-8")
    assert reason.isprintable()


def test_settings_that_a_provider_changes_are_put_back_and_named() -> None:
    import torch

    before = torch_settings()
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    assert restore_torch_settings(before) == "grad mode, default dtype"
    assert torch_settings() == before
    assert restore_torch_settings(before) == ""


def test_a_job_survives_its_json() -> None:
    job = Job((Case("op", "p", "bwd", {"n": 1}, 3),), "cuda:1", MeasurePolicy(target=0.5), 12.5)  # type: ignore[call-arg]
    assert Job.from_json(json.loads(json.dumps(job.to_json()))) == job


def test_overhead_is_ones_own_and_a_share_of_what_all_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0 + step for step in range(100)])
    monkeypatch.setattr(worker.time, "time", lambda: next(clock))
    emit = Emitter(io.StringIO(), since=90.0)
    mine, other = Case("op", "p", "fwd", {}), Case("op", "q", "fwd", {})
    emit.phase(None, "inputs")  # at 100: 10 s since the process was asked for
    emit.phase(mine, "check")  # at 101: 1 s of inputs
    emit.phase(other, "check")  # at 102: 1 s of mine
    emit.phase(mine, "warmup")  # at 103: 1 s of the other's
    emit.phase(mine, "measure")  # at 104
    emit.phase(None, "finish")  # at 105
    assert emit.overhead(mine, cases=2) == pytest.approx(1 + (10 + 1 + 1) / 2)  # at 106: 1 s of finishing
    assert emit.overhead(other, cases=2) == pytest.approx(1 + (10 + 1 + 2) / 2)
    assert "warmup 1.00 s, measure 1.00 s" in emit.phases()
