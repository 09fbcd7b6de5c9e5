"""The waterfall without a GPU: kernels, provider and timer are stand-ins; what is written and drawn is real."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jfabench import cli, waterfall
from jfabench.kernels.attention import launch_sm90, switches_sm90, tune
from jfabench.operator import Call
from jfabench.profile_sweep import case_columns
from jfabench.records import Case
from jfabench.reports import pictures
from jfabench.reports import waterfall as bars
from jfabench.sweep import load_sweep


class Kernel:
    """Counts its launches; `seconds` is what a call takes by the stand-in for the timer."""

    arg_names = ("q", "dq", "ADD_DQ", "STAGES")

    def __init__(self, name: str, seconds: float, seen: list[tuple[str, tuple[Any, ...], dict[str, Any]]]) -> None:
        self.__name__, self.seconds, self._seen = name, seconds, seen

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert grid == (7,)
        return lambda *args, **options: self._seen.append((self.__name__, args, options))


@pytest.fixture
def case() -> Case:
    settings = ["q_len=256", "lengths.max_len=512", "lengths.fill=0.5"]
    return load_sweep("jagged.yaml", "full", settings=settings, only=["tlx_jfa"], directions=["bwd"]).cases[0]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """A provider whose backward launches a list of tiles and the kernel; its `prepare` runs a forward."""
    seen: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
    forward, tiles = Kernel("forward_sm90_kernel", 1.0, seen), Kernel("tile_kernel", 1.0, seen)
    backward = Kernel("backward_sm90_kernel", 4e-3, seen)

    def call() -> None:
        launch_sm90.run_kernel(tiles, (7,), "offsets")
        launch_sm90.run_kernel(backward, (7,), "q", "dq", ADD_DQ=True, STAGES=2, num_warps=4)

    def prepare(_inputs: object, _direction: str) -> Call:
        launch_sm90.run_kernel(forward, (7,), "q")
        return Call(call, lambda _: {})

    provider = SimpleNamespace(unsupported=lambda *_: None, prepare=prepare)
    monkeypatch.setattr(waterfall, "load_providers", lambda _: SimpleNamespace(by_name={waterfall.PROVIDER: provider}))
    operator = waterfall.load_operator("jagged_attention")
    monkeypatch.setattr(type(operator), "make_inputs", lambda *_: None)
    monkeypatch.setattr(
        launch_sm90, "run_kernel", lambda kernel, grid, *args, **options: kernel[grid](*args, **options)
    )
    monkeypatch.setattr(waterfall, "_require_end", lambda _: None)
    monkeypatch.setattr(waterfall, "_gpu", lambda _: "a stand-in")
    # Each stage that is left out saves a millisecond, but for one that makes it slower.
    seconds = {"no dQ": 2e-3, "no mask": 4.4e-3}

    def made(switch: switches_sm90.Switch) -> Kernel:
        return Kernel(switch.kernel, seconds.get(switch.name, 3e-3), seen)

    monkeypatch.setattr(switches_sm90.Switch, "made", made)
    drift = itertools.count()

    def gpu_timer() -> Callable[[waterfall.Launch], float]:
        def seconds_of(launch: waterfall.Launch) -> float:
            launch()
            return float(launch.kernel.seconds * (1 + 1e-4 * (next(drift) % 5)))

        return seconds_of

    monkeypatch.setattr(tune, "gpu_timer", gpu_timer)
    return seen


def test_the_launch_is_the_providers_own(case: Case, launches: list[Any]) -> None:
    launch = waterfall.captured(case, "cuda")
    assert launch.kernel.__name__ == "backward_sm90_kernel"
    assert launch.args == ("q", "dq")
    assert launch.config == "add_dq=True stages=2"
    (switch,) = (s for s in switches_sm90.SWITCHES if s.name == "no dQ")
    without = launch.without(switch)
    assert without.args == ("q", None)
    assert without.options == {"ADD_DQ": False, "STAGES": 2, "num_warps": 4}
    launches.clear()
    without()
    assert launches == [("backward_sm90_kernel", ("q", None), without.options)]


def test_a_kernel_without_a_stage_has_no_switch_for_it() -> None:
    names = {
        s.name for s in switches_sm90.SWITCHES if s.kernel == "backward_sm90_kernel" and s.serves({"ADD_DQ": False})
    }
    assert "no exponentials" in names
    assert names.isdisjoint({"no dQ", "no addition of dQ", "no exchange of dS"})


def test_rows_say_what_a_stage_saves_and_that_they_are_wrong(
    case: Case, launches: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "new" / "waterfall.csv"
    rows = waterfall.waterfall([case], "cuda", target, rounds=4)
    with target.open(newline="") as file:
        assert list(csv.DictReader(file)) == rows
    by_name = {row["variant"]: row for row in rows}
    assert next(iter(by_name)) == waterfall.SHIPPED
    shipped = by_name.pop(waterfall.SHIPPED)
    assert (shipped["results"], shipped["saved"], shipped["note"]) == (waterfall.SHIPPED, "", "")
    assert float(shipped["median_s"]) == pytest.approx(4e-3, rel=1e-3)
    assert len(by_name) == 7
    assert shipped["shape"] == case_columns(case)["shape"]  # joins with the other tables
    for row in by_name.values():
        assert row["results"] == waterfall.WRONG
        assert "no speedup" in row["note"]
        assert row["text"]
    assert float(by_name["no dQ"]["saved"]) == pytest.approx(0.5, abs=1e-3)
    assert float(by_name["no dQ"]["saved_s"]) == pytest.approx(2e-3, rel=1e-2)
    assert float(by_name["no mask"]["saved"]) == pytest.approx(-0.1, abs=1e-3)
    low, high = (float(by_name["no dQ"][f"saved_{end}"]) for end in ("low", "high"))
    assert low <= float(by_name["no dQ"]["saved"]) <= high
    assert "bwd N=512 fill=0.5 M=256 B=768 H=4: no dQ" in capsys.readouterr().out
    # A launch to compile, then in each round one to warm up and those that are timed.
    timed = [name for name, _, _ in launches].count("backward_sm90_kernel")
    assert timed == 1 + 8 * (1 + 4 * (1 + waterfall.CALLS))


def test_the_bars(case: Case, launches: list[Any], tmp_path: Path) -> None:
    waterfall.waterfall([case], "cuda", tmp_path / "waterfall.csv", rounds=4)
    figure = bars.draw(bars.read(tmp_path / "waterfall.csv"))
    (ax,) = figure.axes
    assert [text.get_text() for text in ax.get_yticklabels()][:2] == [waterfall.SHIPPED, "no exponentials"]
    kept, saved = ax.containers[:2]
    assert kept[0].get_width() == pytest.approx(4.0, rel=1e-2)  # milliseconds
    names = [text.get_text() for text in ax.get_yticklabels()]
    assert saved[names.index("no dQ")].get_width() == pytest.approx(2.0, rel=1e-2)
    assert saved[names.index("no mask")].get_width() == 0
    assert "-50.0%" in [text.get_text().strip() for text in ax.texts]
    written = pictures.save(figure, tmp_path / "waterfall")
    assert "Wrong by design" in written[1].read_text()


def test_another_table_is_no_waterfall(tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="is no waterfall: it lacks direction"):
        bars.read(tmp_path / "other.csv")


@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        (["--config", "jagged.yaml"], cli.MACHINE, "on a GPU of sm_90"),
        (["--config", "jagged.yaml", "--out", " "], cli.USAGE, "--out needs"),
        (["--config", "jaged.yaml"], cli.USAGE, "jaged.yaml"),
    ],
)
def test_errors_are_one_sentence(
    words: list[str], code: int, part: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("jfabench.devices.gpu_names", list)
    assert cli.main(["waterfall", *words]) == code
    error = capsys.readouterr().err
    assert part in error
    assert error.count("\n") == 1
