"""Choosing configurations: bounded in time, shared between processes, and never in the way of a call.

Neither a GPU nor a kernel is needed: times come from a table, and so does the clock.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.runtime.errors import OutOfResources

from jfabench.kernels.attention import choices, config, config_sm90, notice, tune
from jfabench.kernels.attention.config import Config
from jfabench.kernels.attention.kinds import Kind, power_of_two_below

KIND = Kind("triton", "forward", "bfloat16", 128, 1, True, False, False, 256, 512)
GPU = "NVIDIA H200"
FIRST, SECOND, THIRD = CONFIGS = tuple(Config(64, 64, 4, stages) for stages in (1, 2, 3))
SHARED_LIMIT = 227 * 1024


@dataclass
class Machine:
    """A GPU on which a launch takes ``run_ms``, and the first one of a process ``compile_s`` more, of host time."""

    run_ms: dict[Config, float] = field(default_factory=lambda: {FIRST: 3.0, SECOND: 1.0, THIRD: 2.0})
    compile_s: dict[Config, float] = field(default_factory=dict)
    lacks_resources: tuple[Config, ...] = ()
    now: float = 1000.0
    launches: list[Config] = field(default_factory=list)

    def launch(self, config: Config) -> None:
        if config in self.lacks_resources:
            raise OutOfResources(300_000, SHARED_LIMIT, "shared memory")
        if config not in self.launches:
            self.now += self.compile_s.get(config, 0.0)
        self.launches.append(config)
        self.now += self.run_ms[config] * 1e-3

    def seconds_of(self, run: Callable[[], object]) -> float:
        run()
        return self.run_ms[self.launches[-1]] * 1e-3

    def choose(self, kind: Kind = KIND, gpu: str = GPU, candidates: tuple[Config, ...] = CONFIGS) -> Config:
        return tune.choose(kind, gpu, candidates, self.launch, self.now)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JFABENCH_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Machine], Machine]]:
    """Makes a machine the one that is timed, in what is a new process as far as choices go."""

    def use(machine: Machine) -> Machine:
        monkeypatch.setattr(tune, "gpu_timer", lambda: machine.seconds_of)
        monkeypatch.setattr(tune, "clock", lambda: machine.now)
        monkeypatch.setattr(tune, "is_capturing", lambda: False)
        monkeypatch.setattr(tune, "_chosen", {})
        return machine

    monkeypatch.delenv("JFABENCH_TUNE", raising=False)
    notice.say_once.cache_clear()
    yield use
    notice.say_once.cache_clear()


Install = Callable[[Machine], Machine]


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


# The choice -----------------------------------------------------------------------------------------------------------


def test_the_fastest_is_chosen_and_remembered(install: Install) -> None:
    machine = install(Machine())
    assert machine.choose() == SECOND
    count = len(machine.launches)
    assert count <= len(CONFIGS) * (1 + tune.ROUNDS)
    assert machine.choose() == SECOND
    assert len(machine.launches) == count


def test_rounds_are_interleaved(install: Install) -> None:
    machine = install(Machine())
    machine.choose()
    assert machine.launches == [*CONFIGS] * (1 + tune.ROUNDS)


def test_a_gain_within_chance_is_no_gain(install: Install) -> None:
    assert install(Machine(run_ms={FIRST: 1.0, SECOND: 0.995, THIRD: 1.0})).choose() == FIRST


def test_one_slow_launch_does_not_decide(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = install(Machine())
    calls = iter(range(1000))
    monkeypatch.setattr(tune, "gpu_timer", lambda: lambda run: machine.seconds_of(run) + (next(calls) in (4, 7)))
    assert machine.choose() == SECOND


def test_what_the_device_cannot_run_is_left_out(install: Install) -> None:
    assert install(Machine(lacks_resources=(SECOND,))).choose() == THIRD
    assert install(Machine(lacks_resources=(FIRST,))).choose(dataclasses.replace(KIND, head_dim=64)) == SECOND
    with pytest.raises(RuntimeError, match="no configuration of a kernel runs on this GPU: out of resource"):
        install(Machine(lacks_resources=CONFIGS)).choose(dataclasses.replace(KIND, group=2))


@pytest.mark.parametrize("candidates", [CONFIGS, CONFIGS[:1]])
def test_nothing_is_timed_where_there_is_no_choice(
    install: Install, monkeypatch: pytest.MonkeyPatch, candidates: tuple[Config, ...]
) -> None:
    machine = install(Machine())
    if len(candidates) > 1:
        monkeypatch.setenv("JFABENCH_TUNE", "0")
    assert machine.choose(candidates=candidates) == FIRST
    assert machine.launches == []


def test_switched_off_means_defaults_also_where_another_choice_is_known(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = install(Machine())
    assert machine.choose() == SECOND
    monkeypatch.setenv("JFABENCH_TUNE", "0")
    assert machine.choose() == FIRST


def test_while_a_graph_is_captured_what_is_known_serves(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = install(Machine())
    monkeypatch.setattr(tune, "is_capturing", lambda: True)
    assert machine.choose() == FIRST
    assert machine.launches == []
    with monkeypatch.context() as outside:
        outside.setattr(tune, "is_capturing", lambda: False)
        assert machine.choose() == SECOND
    assert machine.choose() == SECOND
    another = install(Machine())
    monkeypatch.setattr(tune, "is_capturing", lambda: True)
    assert another.choose() == SECOND  # from the disk
    assert another.launches == []


def test_a_full_memory_leaves_the_default(install: Install, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    machine = install(Machine())

    def full() -> None:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(tune, "gpu_timer", full)
    assert machine.choose() == FIRST
    assert files(folder) == []
    assert install(machine).choose() == SECOND


# The budget -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("each", [0.1, 3.0, 6.0, 9.9, 10.1, 30.0])
def test_a_call_ends_within_the_budget(install: Install, each: float) -> None:
    machine = install(Machine(compile_s=dict.fromkeys(CONFIGS, each)))
    began = machine.now
    machine.choose()
    assert machine.now - began <= max(tune.BUDGET_SECONDS, each + 1)
    assert FIRST in machine.launches
    tried = {0.1: 3, 3.0: 3, 6.0: 3, 9.9: 2, 10.1: 1, 30.0: 1}[each]
    assert len(set(machine.launches)) == tried


def test_time_spent_before_counts(install: Install) -> None:
    """A backward chooses twice, and both choices share the budget of the call."""
    machine = install(Machine(compile_s=dict.fromkeys(CONFIGS, 4.0)))
    began = machine.now
    for kernel in ("dkdv", "dq"):
        tune.choose(dataclasses.replace(KIND, kernel=kernel), GPU, CONFIGS, machine.launch, began)
        machine.launches.clear()
    assert machine.now - began <= tune.BUDGET_SECONDS + 1


def test_a_compilation_longer_than_any_before_is_the_last(install: Install) -> None:
    machine = install(Machine(compile_s={FIRST: 1.0, SECOND: 40.0, THIRD: 1.0}))
    machine.choose()
    assert THIRD not in machine.launches


def test_long_launches_stop_in_time(install: Install) -> None:
    machine = install(Machine(run_ms={FIRST: 4e3, SECOND: 3e3, THIRD: 2e3}))
    assert machine.choose() == THIRD
    assert machine.launches == [*CONFIGS, *CONFIGS, FIRST]  # which began after 18 seconds


def test_the_next_process_tries_what_was_left(install: Install) -> None:
    slow = {FIRST: 9.0, SECOND: 9.0, THIRD: 9.0}
    run_ms = {FIRST: 3.0, SECOND: 2.0, THIRD: 1.0}
    first = install(Machine(run_ms, compile_s=slow))
    assert first.choose() == SECOND
    second = install(Machine(run_ms, compile_s=slow))
    assert second.choose() == THIRD
    assert FIRST not in second.launches
    third = install(Machine(run_ms, compile_s=slow))
    assert third.choose() == THIRD
    assert third.launches == []


# The files ------------------------------------------------------------------------------------------------------------

CHILD = """
import sys
from jfabench.kernels.attention import tune
from jfabench.kernels.attention.config import Config
from jfabench.kernels.attention.kinds import Kind

fastest, names = int(sys.argv[1]), sys.argv[2:]
launched = []
def seconds_of(run):
    run()
    return 1.0 if launched[-1].num_stages == fastest else 2.0
tune.gpu_timer = lambda: seconds_of
tune.is_capturing = lambda: False
candidates = [Config(64, 64, 4, stages) for stages in (1, 2, 3)]
for name in names:
    kind = Kind("triton", name, "bfloat16", 128, 1, True, False, False, 256, 512)
    chosen = tune.choose(kind, "NVIDIA H200", candidates, launched.append, tune.clock())
    print(name, chosen.num_stages, len(launched))
"""


def child(fastest: int, *names: str) -> subprocess.Popen[str]:
    environment = {key: value for key, value in os.environ.items() if key != "JFABENCH_TUNE"}
    command = [sys.executable, "-c", CHILD, str(fastest), *names]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def answer(process: subprocess.Popen[str]) -> list[str]:
    out, error = process.communicate(timeout=120)
    assert process.returncode == 0, error
    assert error == ""
    return out.splitlines()


@pytest.mark.usefixtures("folder")
def test_a_second_process_takes_the_choice_of_the_first() -> None:
    (first,) = answer(child(3, "forward"))
    assert first.startswith("forward 3 ")
    assert answer(child(2, "forward")) == ["forward 3 0"]  # launched nothing, though another would win here


def test_processes_that_write_at_once_lose_nothing(folder: Path) -> None:
    shared = [f"both{i}" for i in range(20)]
    names = [[f"{side}{i}" for i in range(40)] for side in ("left", "right")]
    mixed = [[*own, *shared] for own in names]
    writers = [child(stages, *kinds) for stages, kinds in zip((2, 3), mixed, strict=True)]
    for process in writers:
        answer(process)
    assert len(files(folder)) == 100
    assert all(json.loads(path.read_text())["config"] for path in files(folder))
    expected = [f"{name} {stages} 0" for stages, own in zip((2, 3), names, strict=True) for name in own]
    assert answer(child(1, *names[0], *names[1])) == expected
    assert {line.split()[-1] for line in answer(child(1, *shared))} == {"0"}


CORRUPT = ["", "{", "[]", "null", "\x00\xff", '{"config": {}}', "1" * 5000]


@pytest.mark.parametrize("text", CORRUPT)
def test_a_corrupt_file_is_ignored_said_once_and_replaced(
    install: Install, folder: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    install(Machine()).choose()
    (path,) = files(folder)
    path.write_bytes(text.encode("latin-1"))
    machine = install(Machine())
    with caplog.at_level(logging.WARNING):
        assert choices.load(GPU, KIND) is None
        assert machine.choose() == SECOND
    assert [str(path) in record.message for record in caplog.records] == [True]
    assert install(Machine()).choose() == SECOND
    assert len(machine.launches) > 0
    assert files(folder) == [path]


@pytest.mark.parametrize("change", [{"config": {"block_m": 1}}, {"config": 3}, {"untried": 7}, {"untried": None}])
def test_a_record_that_makes_no_sense_is_no_obstacle(install: Install, folder: Path, change: dict[str, Any]) -> None:
    install(Machine()).choose()
    (path,) = files(folder)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert install(Machine()).choose() == SECOND


@pytest.mark.parametrize("refused", ["mkdir", "write_text", "replace"])
def test_a_folder_that_cannot_be_written_costs_only_the_file(
    install: Install, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, folder: Path, refused: str
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    machine = install(Machine())
    monkeypatch.setattr(Path, refused, refuse)
    with caplog.at_level(logging.WARNING):
        assert machine.choose() == SECOND
        assert machine.choose(dataclasses.replace(KIND, head_dim=64)) == SECOND
    assert machine.choose() == SECOND
    (record,) = caplog.records
    assert "JFABENCH_CACHE_DIR" in record.message
    assert files(folder) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_read(install: Install, folder: Path) -> None:
    install(Machine()).choose()
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    machine = install(Machine())
    assert machine.choose() == SECOND
    assert machine.launches == []
    assert machine.choose(dataclasses.replace(KIND, head_dim=64)) == SECOND
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755)


@pytest.mark.parametrize("place", ["under a file", "no home"])
def test_without_a_folder_choices_still_work(
    install: Install, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    if place == "under a file":
        (tmp_path / "file").touch()
        monkeypatch.setenv("JFABENCH_CACHE_DIR", str(tmp_path / "file" / "cache"))
    else:
        for name in ("JFABENCH_CACHE_DIR", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(Path, "home", homeless)
    assert install(Machine()).choose() == SECOND


def test_where_the_files_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: Path("/home/someone"))
    for name in ("JFABENCH_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert choices.cache_dir() == Path("/home/someone/.cache/jfabench")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache")
    assert choices.cache_dir() == Path("/var/cache/jfabench")
    monkeypatch.setenv("JFABENCH_CACHE_DIR", "/mine")
    assert choices.cache_dir() == Path("/mine")


@pytest.mark.parametrize("what", ["gpu", "torch", "triton", "kernels", "kind"])
def test_a_choice_is_for_one_gpu_software_and_kind(
    install: Install, monkeypatch: pytest.MonkeyPatch, folder: Path, what: str
) -> None:
    install(Machine()).choose()
    kind, gpu = KIND, GPU
    if what == "gpu":
        gpu = "NVIDIA H100 80GB HBM3"
    elif what == "kind":
        kind = dataclasses.replace(KIND, mean_k=1024)
    elif what == "kernels":
        monkeypatch.setattr(choices, "sources_digest", lambda: "another")
    else:
        monkeypatch.setattr(getattr(choices, what), "__version__", "9.9")
    faster = install(Machine(run_ms={FIRST: 1.0, SECOND: 9.0, THIRD: 9.0}))
    assert faster.choose(kind, gpu) == FIRST
    assert len(files(folder)) == 2  # the old one is still there, for those who go back
    monkeypatch.undo()


def test_every_field_of_a_kind_tells_kinds_apart(folder: Path) -> None:
    other = {str: "other", int: 7, bool: True}
    kinds = [KIND]
    for item in dataclasses.fields(Kind):
        value = getattr(KIND, item.name)
        kinds.append(
            dataclasses.replace(KIND, **{item.name: not value if isinstance(value, bool) else other[type(value)]})
        )
    for number, kind in enumerate(kinds):
        choices.save(GPU, kind, {"config": {"number": number}})
    found = [choices.load(GPU, kind) for kind in kinds]
    assert [record and record["config"] for record in found] == [{"number": n} for n in range(len(kinds))]


def test_a_file_says_what_it_is_about(install: Install, folder: Path) -> None:
    install(Machine()).choose()
    (path,) = files(folder)
    record = json.loads(path.read_text())
    assert record["gpu"] == GPU
    assert record["torch"] == torch.__version__
    assert record["kind"] == dataclasses.asdict(KIND)
    assert record["config"] == dataclasses.asdict(SECOND)
    assert record["untried"] == []
    assert {row["num_stages"]: row["median"] for row in record["seconds"]} == {1: 0.003, 2: 0.001, 3: 0.002}


def test_a_launch_that_is_timed_may_choose_too(install: Callable[[Machine], Machine]) -> None:
    """A configuration may stand for two kernels, the second of which is chosen when it is first launched."""
    machine = install(Machine())
    inner = dataclasses.replace(KIND, kernel="inner")

    def launch(config: Config) -> None:
        machine.choose(inner)
        machine.launch(config)

    tune.choose(KIND, GPU, CONFIGS, launch, machine.now)
    assert {kind for _, kind in tune._chosen} == {KIND, inner}


# What there is to choose among ----------------------------------------------------------------------------------------

KINDS = [
    Kind("any", kernel, "bfloat16", head_dim, 1, broadcast, masked, masked, mean_q, mean_k)
    for kernel in ("forward", "backward", "dkdv", "dq")
    for masked in (False, True)
    for head_dim in (64, 128)
    for broadcast in (False, True)
    for mean_q in (0, 16, 64, 256)
    for mean_k in (0, 32, 64, 512, 1024, 8192)
]


@pytest.mark.parametrize("module", [config, config_sm90])
def test_candidates_fit_and_start_with_the_default(module: Any) -> None:
    for kind in KINDS:
        if kind.kernel not in module.CANDIDATES:
            continue
        usable = module.candidates(kind, SHARED_LIMIT)
        assert usable[0] == module.default(kind)
        assert all(module.fits(kind.kernel, each, kind.head_dim, SHARED_LIMIT) for each in usable)
        assert len({*usable}) == len(usable)


@pytest.mark.parametrize("module", [config, config_sm90])
def test_every_candidate_fits_somewhere_and_none_fits_nothing(module: Any) -> None:
    for kernel, configs in module.CANDIDATES.items():
        for each in configs:
            assert module.fits(kernel, each, 64, SHARED_LIMIT)
            assert not module.fits(kernel, each, 128, 16 * 1024)


def test_lengths_are_sorted_into_powers_of_two() -> None:
    assert [power_of_two_below(n) for n in (0, 1, 2, 3, 4, 255, 256, 257)] == [0, 1, 2, 2, 4, 128, 256, 256]
