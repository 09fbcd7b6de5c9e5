from __future__ import annotations

import io
import json
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from jfabench import visit, worker
from jfabench.operator import Call, Providers, load_providers
from jfabench.policy import MeasurePolicy
from jfabench.records import Case, Record
from jfabench.run import Workers
from jfabench.sweep import load_sweep
from jfabench.visit import Job, describe_failure, restore_torch_settings, run_job, torch_settings
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


def test_the_log_names_what_took_long_in_one_case(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 103.0, 103.5, 109.0, 110.0])
    monkeypatch.setattr(worker.time, "time", lambda: next(clock))
    emit = Emitter(io.StringIO(), since=90.0)
    case = Case("op", "tuned", "bwd", {})
    emit.phase(case, "first call")
    emit.phase(case, "check")  # after 3 s
    emit.phase(case, "measure")  # after 0.5 s
    emit.phase(None, "finish")  # after 5.5 s, which are no overhead
    text = "start 10.00 s, first call 3.00 s, check 0.50 s, measure 5.50 s, finish 1.00 s"
    assert emit.phases() == f"{text} (first call of tuned bwd 3.00 s)"


# The process ---------------------------------------------------------------------------------------------------------


class Heard:
    def __init__(self) -> None:
        self.phases: list[tuple[str | None, str]] = []

    def phase(self, case: Case | None, phase: str) -> None:
        self.phases.append((case.provider if case else None, phase))

    def record(self, record: Record) -> None: ...


def small_job(fill: float) -> Job:
    settings = ["lengths.max_len=32", f"lengths.fill={fill}", "measure.max_seconds=0.02", "measure.warmup_seconds=0.01"]
    sweep = load_sweep("jagged.yaml", "cpu", settings=settings, only=["reference", "sdpa_padded"])
    return Job(sweep.cases, "cpu", sweep.config.measure, time.time())


def test_one_process_does_job_after_job(tmp_path: Path) -> None:
    """And what takes long once in a process burdens the first of them alone."""
    log, heard = tmp_path / "worker.log", Heard()
    workers = Workers("cpu", log, 60.0)
    first = list(workers.run(small_job(0.5), heard))
    phases = [phase for who, phase in heard.phases if who == "reference"]
    assert phases[:4] == ["prepare", "first call", "check", "prepare"]
    (process,) = (worker.process for worker in workers._idle)
    second = list(workers.run(small_job(0.9), heard))
    assert not workers.fresh
    assert [worker.process for worker in workers._idle] == [process]
    workers.close()
    assert process.returncode == 0
    assert [record.status for record in first + second] == ["ok"] * 8
    assert log.read_text().count("4 cases of jagged_attention: start ") == 2
    spent = [sum(record.overhead_seconds or 0.0 for record in records) for records in (first, second)]
    assert spent[1] < spent[0] / 2


class ChangesGradMode:
    """Right, but leaves gradients switched off in its last calls, while it is timed."""

    name, operator, summary = "reference", "jagged_attention", "for a test"

    def unavailable(self, device: str) -> None: ...

    def unsupported(self, params: Any, direction: Any) -> None: ...

    def prepare(self, inputs: Any, direction: Any) -> Call:
        call = load_providers("jagged_attention").by_name["reference"].prepare(inputs, direction)
        calls = iter(range(10**6))
        self.inputs = weakref.ref(inputs)

        def run() -> Any:
            result = call.run()
            if next(calls) > 2:
                torch.set_grad_enabled(False)
            return result

        return Call(run, call.results)


def test_a_job_leaves_the_process_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    provider = ChangesGradMode()
    monkeypatch.setattr(visit, "load_providers", lambda _: Providers({"reference": provider}, ()))
    job = small_job(0.5)
    before = torch_settings()
    emit = Emitter(io.StringIO())
    run_job(Job(job.cases[:1], job.device, job.policy), emit)
    assert '"status": "ok"' in emit.stream.getvalue()  # type: ignore[attr-defined]
    assert torch_settings() == before
    assert provider.inputs() is None, "nobody holds the tensors any more"


def test_standard_input_belongs_to_nobody_else(tmp_path: Path) -> None:
    program = (
        "import io, json, os, sys\n"
        "from jfabench import worker\n"
        "jobs = worker._jobs()\n"
        "print([job.device for job in jobs], os.read(0, 100))\n"
    )
    lines = "".join(json.dumps(Job((), device, MeasurePolicy()).to_json()) + "\n" for device in ("cpu", "cuda"))  # type: ignore[call-arg]
    done = subprocess.run([sys.executable, "-c", program], input=lines, capture_output=True, text=True, check=True)
    assert done.stdout == "['cpu', 'cuda'] b''\n"


def test_the_slow_imports_are_done_ahead() -> None:
    """Nothing more is imported when a check begins: torch's compiler is there, and the GPU is untouched."""
    program = (
        "import sys\n"
        "from jfabench import worker\n"
        "worker._import_ahead()\n"
        "import torch\n"
        "from jfabench.check import poisoned_allocations\n"
        "before = set(sys.modules)\n"
        "with poisoned_allocations():\n"
        "    torch.empty(3)\n"
        "print(len(set(sys.modules) - before), torch.cuda.is_initialized())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "0 False\n"


@pytest.mark.parametrize(("left", "again"), [(0, True), (worker.MOST_LEFT_BEHIND, True), (2**40, False)])
def test_a_worker_that_cannot_let_go_of_memory_takes_no_other_job(
    left: int, again: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(worker, "run_job", lambda job, emit: None)
    monkeypatch.setattr(worker, "_limit_memory", lambda kind: None)
    monkeypatch.setattr(worker, "bytes_left_behind", lambda kind: left)
    assert worker._serve(small_job(0.5), Emitter(io.StringIO())) is again
    assert ("still in use" in capsys.readouterr().out) is not again
