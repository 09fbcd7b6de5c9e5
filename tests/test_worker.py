from __future__ import annotations

import gc
import io
import json
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted_worker import Heard

from jfabench import visit, worker
from jfabench.operator import Call, Preloading, Providers, Unavailable, load_providers
from jfabench.policy import MeasurePolicy
from jfabench.records import Case, overhead
from jfabench.sweep import load_sweep
from jfabench.visit import Job, Preparation, describe_failure, restore_torch_settings, run_job, torch_settings
from jfabench.worker import Emitter, prepare
from jfabench.workers import Workers


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


def test_a_worker_of_an_older_revision_gets_only_policies_that_it_knows() -> None:
    known = {"mode", "target", "rounds", "min_iterations", "max_iterations", "max_seconds", "warmup_seconds"}
    assert set(Job((), "cuda", MeasurePolicy(target=0.5)).to_json()["policy"]) == known  # type: ignore[call-arg]
    cold = MeasurePolicy(warm_up=False)  # type: ignore[call-arg]
    assert Job.from_json(Job((), "cuda", cold).to_json()).policy == cold


def test_a_job_survives_its_json() -> None:
    job = Job((Case("op", "p", "bwd", {"n": 1}, 3),), "cuda:1", MeasurePolicy(target=0.5))  # type: ignore[call-arg]
    assert Job.from_json(json.loads(json.dumps(job.to_json()))) == job


def test_a_preparation_survives_its_json() -> None:
    preparation = Preparation("op", ("p", "q"), "cuda:1")
    assert Preparation.from_json(json.loads(json.dumps(preparation.to_json()))) == preparation


# Preparing -----------------------------------------------------------------------------------------------------------


class Library:
    """A provider whose library is imported ahead."""

    operator, summary = "jagged_attention", "for a test"

    def __init__(self, name: str, preload: Callable[[], None], missing: str = "") -> None:
        self.name, self._preload, self._missing = name, preload, missing
        self.preloaded = 0

    def unavailable(self, device: str) -> Unavailable | None:
        if self._missing == "raises":
            raise RuntimeError("cannot be asked")
        return Unavailable(self._missing, "") if self._missing else None

    def unsupported(self, params: Any, direction: Any) -> None: ...

    def prepare(self, inputs: Any, direction: Any) -> Call:
        return load_providers("jagged_attention").by_name["reference"].prepare(inputs, direction)

    def preload(self) -> None:
        self.preloaded += 1
        self._preload()


def fail(error: BaseException) -> None:
    raise error


def test_libraries_are_imported_once_before_any_job(monkeypatch: pytest.MonkeyPatch) -> None:
    libraries = [
        Library("good", lambda: None),
        Library("missing", lambda: fail(ImportError("no such file")), missing="not installed"),
        Library("unknown", lambda: fail(ImportError("no such file")), missing="raises"),
        Library("broken", lambda: fail(ImportError("undefined symbol"))),
        Library("exits", lambda: fail(SystemExit("wrong machine"))),
        Library("rude", lambda: torch.set_grad_enabled(False)),
        Library("unasked", lambda: None),
    ]
    monkeypatch.setattr(worker, "load_providers", lambda _: Providers({p.name: p for p in libraries}, ()))
    monkeypatch.setattr(gc, "freeze", lambda: None)  # in the process of a test it would last
    emit = Emitter(io.StringIO())
    names = ("good", "missing", "unknown", "broken", "exits", "rude", "no such provider")
    failed = prepare(Preparation("jagged_attention", names, "cpu"), emit)
    assert torch.is_grad_enabled()
    assert {name: reason.split(" (at")[0] for name, reason in failed.items()} == {
        "broken": "ImportError: undefined symbol",
        "exits": "SystemExit: wrong machine",
    }
    assert [p.name for p in libraries if p.preloaded] == ["good", "broken", "exits", "rude"]
    assert {p.preloaded for p in libraries} == {0, 1}
    events = [json.loads(line) for line in emit.stream.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert [event["provider"] for event in events] == ["good", "broken", "exits", "rude"]


def test_a_library_that_cannot_be_imported_makes_its_provider_unavailable_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    providers = {name: Library(name, lambda: None) for name in ("reference", "sdpa_padded")}
    monkeypatch.setattr(visit, "load_providers", lambda _: Providers(providers, ()))
    job, heard = small_job(0.5), Heard()
    run_job(job, heard, {"sdpa_padded": "ImportError: undefined symbol"})
    assert {(r.case.provider, r.status) for r in heard.records} == {
        ("reference", "ok"),
        ("sdpa_padded", "unavailable"),
    }
    (reason,) = {record.reason for record in heard.records if record.status == "unavailable"}
    assert reason == "its library cannot be imported (ImportError: undefined symbol): reinstall it"
    assert heard.phases[0] == (None, "set-up")


@pytest.mark.parametrize("name", ["torch_varlen", "triton_jfa", "fa3", "fa4", "fa4_kernel", "tlx_jfa"])
def test_providers_that_need_a_library_offer_to_import_it(name: str) -> None:
    assert isinstance(load_providers("jagged_attention").by_name[name], Preloading)


def test_a_provider_need_not_offer_it() -> None:
    assert not isinstance(load_providers("jagged_attention").by_name["reference"], Preloading)


# The process ---------------------------------------------------------------------------------------------------------


def small_job(fill: float) -> Job:
    settings = ["lengths.max_len=32", f"lengths.fill={fill}", "measure.max_seconds=0.02", "measure.warmup_seconds=0.01"]
    sweep = load_sweep("jagged.yaml", "cpu", settings=settings, only=["reference", "sdpa_padded"])
    return Job(sweep.cases, "cpu", sweep.config.measure)


def test_one_process_does_job_after_job(tmp_path: Path) -> None:
    """And what takes long once in a process burdens no case of it."""
    log, heard = tmp_path / "worker.log", Heard()
    workers = Workers("cpu", log, 60.0)
    workers.start(heard)
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
    assert {record.worker for record in first + second} == {process.pid}
    spent = [sum(overhead(record) or 0.0 for record in records) for records in (first, second)]
    assert 0 < min(spent) <= max(spent) < workers.startup_seconds
    assert set(first[0].phases) >= {"set-up", "inputs", "oracle", "prepare", "first call", "check", "warmup", "measure"}


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
        "import io, os, sys\n"
        "os.environ['TRITON_INTERPRET'] = '1'\n"
        "from jfabench.visit import Preparation\n"
        "from jfabench.worker import Emitter, prepare\n"
        "failed = prepare(Preparation('jagged_attention', ('triton_jfa',), 'cpu'), Emitter(io.StringIO()))\n"
        "import gc, torch\n"
        "from jfabench.check import poisoned_allocations\n"
        "before = set(sys.modules)\n"
        "with poisoned_allocations():\n"
        "    torch.empty(3)\n"
        "checking = len(set(sys.modules) - before)\n"
        "from jfabench.kernels import jagged_flash_attention as attention\n"
        "q = torch.zeros(8, 1, 64, dtype=torch.bfloat16)\n"
        "attention(q, q, q, torch.tensor([0, 8]), kernels='triton')\n"
        "ours = [name for name in set(sys.modules) - before if name.startswith('jfabench')]\n"
        "print(failed, checking, ours, torch.cuda.is_initialized(), gc.get_freeze_count() > 100_000)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "{} 0 [] False True\n"


@pytest.mark.parametrize(("left", "again"), [(0, True), (worker.MOST_LEFT_BEHIND, True), (2**40, False)])
def test_a_worker_that_cannot_let_go_of_memory_takes_no_other_job(
    left: int, again: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(worker, "run_job", lambda *arguments: None)
    monkeypatch.setattr(worker, "_limit_memory", lambda kind: None)
    monkeypatch.setattr(worker, "bytes_left_behind", lambda kind: left)
    assert worker._serve(small_job(0.5), Emitter(io.StringIO()), {}) is again
    assert ("still in use" in capsys.readouterr().out) is not again
