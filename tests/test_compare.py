"""Comparisons: from folders, and measured in turns by the (fake) workers of two trees."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_tree
import nights
import pytest

from jfabench import compare, compare_command, interleaved
from jfabench.cli import build_parser, main
from jfabench.compare import CompareError
from jfabench.policy import MeasurePolicy
from jfabench.records import Record
from jfabench.regression import Comparison, Noise
from jfabench.sweep import load_sweep
from jfabench.trees import Tree


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def side(root: Path, *blocks: Sequence[Record]) -> Path:
    for number, records in enumerate(blocks):
        nights.write(root / f"pair-{number:02d}", records)
    return root


def block(factor: float = 1.0, **changes: Any) -> list[Record]:
    """One process: two cases."""
    return [nights.record(nights.case(n), 1e-3 * n * factor, nights.night(0), **changes) for n in (1, 2)]


# Folders -------------------------------------------------------------------------------------------------------------


def test_pairs_of_two_folders_are_compared(tmp_path: Path) -> None:
    shifts = (1.0, 1.05, 0.97, 1.02)  # the machine drifts, and both sides alike
    a = side(tmp_path / "a", *(block(shift) for shift in shifts))
    b = side(tmp_path / "b", *(block(shift * 1.03 * (1 + i * 1e-4)) for i, shift in enumerate(shifts)))
    found = compare.from_folders(a, b)
    assert [case.verdict for case in found.cases] == ["slower", "slower"]
    assert [case.estimate.shown.middle for case in found.cases] == pytest.approx([1.03] * 2, abs=1e-3)
    assert found.cases[0].seconds[0] == pytest.approx(1e-3 * math.prod(shifts) ** 0.25)
    assert found.regressed
    mean, count = found.means["tlx_jfa", "fwd"]
    assert (count, mean.middle) == (2, pytest.approx(1.03, abs=1e-3))
    assert main(["compare", str(a), str(b), "--out", str(tmp_path / "out")]) == 1
    assert main(["compare", str(b), str(a), "--out", str(tmp_path / "out")]) == 0  # faster is no fault
    assert main(["compare", str(a), str(a), "--out", str(tmp_path / "out")]) == 0


def test_folders_that_were_not_measured_in_turns_keep_the_drift(tmp_path: Path) -> None:
    shifts = (1.0, 1.05, 0.97, 1.02)
    a = side(tmp_path / "monday" / "a", *(block(shift) for shift in shifts))
    b = side(tmp_path / "today" / "b", *(block(shift * 1.03) for shift in shifts))
    found = compare.from_folders(a, b)
    assert not found.cases[0].blocks.paired
    assert [case.verdict for case in found.cases] == ["cannot tell"] * 2


def test_one_process_a_side_tells_nothing_until_the_noise_is_known(tmp_path: Path) -> None:
    a, b = nights.write(tmp_path / "a", block()).root, nights.write(tmp_path / "b", block(1.05)).root
    found = compare.from_folders(a, b)
    assert [case.verdict for case in found.cases] == ["cannot tell"] * 2
    assert found.cases[0].estimate.shown.middle == pytest.approx(1.05)
    assert "compare --aa" in found.notes[-1]
    compare.store_noise(Noise(0.005, 0.002, 15, 30, 8, env=nights.ENV))
    found = compare.from_folders(a, b)
    assert [case.verdict for case in found.cases] == ["slower"] * 2
    assert found.noise is not None
    compare.store_noise(Noise(0.06, 0.002, 15, 30, 8, env=nights.ENV))
    assert compare.from_folders(a, b).limit == 0.06


def test_the_noise_of_another_machine_is_not_used(tmp_path: Path) -> None:
    compare.store_noise(Noise(0.06, 0.002, 15, 30, 8, env={**nights.ENV, "gpu": "NVIDIA B200"}))
    assert compare.load_noise(nights.ENV) is None
    compare.noise_path().write_text("damaged")
    assert compare.load_noise(nights.ENV) is None


def test_devices_do_not_compare_and_software_is_named(tmp_path: Path) -> None:
    a = side(tmp_path / "a", block(), block())
    b200 = side(tmp_path / "b", *(block(env={**nights.ENV, "gpu": "NVIDIA B200"}),) * 2)
    torch = side(tmp_path / "c", *(block(env={**nights.ENV, "torch": "2.13.0"}),) * 2)
    with pytest.raises(CompareError, match="different devices"):
        compare.from_folders(a, b200)
    assert main(["compare", str(a), str(b200)]) == 2
    assert "torch 2.13.0" in compare.from_folders(a, torch).notes[0]


def changed(was: Record, now: Record, tmp_path: Path) -> Comparison:
    return compare.from_folders(side(tmp_path / "a", [was], [was]), side(tmp_path / "b", [now], [now]))


def test_a_case_that_is_wrong_now_is_a_regression(tmp_path: Path) -> None:
    was = nights.record(nights.case(1), 1e-3, nights.night(0))
    (case,) = changed(was, replace(was, status="wrong", reason="out: NaN"), tmp_path).cases
    assert case.broken
    assert case.changes == ("ok -> wrong: out: NaN",)
    assert case.verdict == "cannot tell"
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(tmp_path / "out")]) == 1
    assert main(["compare", str(tmp_path / "b"), str(tmp_path / "a"), "--out", str(tmp_path / "out")]) == 0


def test_one_wrong_block_is_enough(tmp_path: Path) -> None:
    was = nights.record(nights.case(1), 1e-3, nights.night(0))
    a = side(tmp_path / "a", [was], [was])
    b = side(tmp_path / "b", [was], [replace(was, status="wrong")])
    assert compare.from_folders(a, b).cases[0].status == ("ok", "wrong")


def test_an_unavailable_provider_is_no_regression(tmp_path: Path) -> None:
    was = nights.record(nights.case(1), 1e-3, nights.night(0))
    gone = replace(was, status="unavailable", reason="no FA4", measurement=None)
    found = changed(was, gone, tmp_path)
    assert not found.regressed
    assert found.cases[0].changes == ("ok -> unavailable: no FA4",)


def test_errors_kernels_and_counters_that_changed_are_named(tmp_path: Path) -> None:
    was = nights.record(
        nights.case(1), 1e-3, nights.night(0), counters={"registers": 168, "dram_bytes": 1e9, "name": "k"}
    )
    assert was.measurement is not None
    now = replace(
        was,
        checks=(replace(was.checks[0], rel_norm=9e-3),),
        counters={"registers": 200, "dram_bytes": 1.001e9, "name": "other"},
    )
    was, now = (
        replace(r, measurement=replace(was.measurement, kernels_per_call=k)) for r, k in ((was, 1.0), (now, 3.0))
    )
    (case,) = changed(was, now, tmp_path).cases
    assert case.changes == ("error of out 0.002 -> 0.009", "kernels of a call 1 -> 3", "registers 168 -> 200")


def test_counters_that_profile_left_are_used(tmp_path: Path) -> None:
    was = nights.record(nights.case(1), 1e-3, nights.night(0))
    a, b = (nights.write(tmp_path / name, [was]) for name in "ab")
    for folder, registers in ((a, 168), (b, 255)):
        counted = replace(was, measurement=None, counters={"registers": registers})
        (folder.root / "profile.jsonl").write_text(counted.to_line())
    (case,) = compare.from_folders(a.root, b.root).cases
    assert case.changes == ("registers 168 -> 255",)


def test_cases_of_one_side_only_are_named(tmp_path: Path) -> None:
    common, more = (nights.record(nights.case(n), 1e-3, nights.night(0)) for n in (1, 2))
    found = compare.from_folders(
        nights.write(tmp_path / "a", [common]).root, nights.write(tmp_path / "b", [common, more]).root
    )
    assert found.cases[1].status == ("missing", "ok")
    assert found.cases[1].changes == ("only in B",)
    with pytest.raises(CompareError, match="no case in common"):
        compare.from_folders(tmp_path / "a", nights.write(tmp_path / "c", [more]).root)


def test_times_of_different_modes_do_not_compare(tmp_path: Path) -> None:
    was = nights.record(nights.case(1), 1e-3, nights.night(0))
    assert was.measurement is not None
    (case,) = changed(was, replace(was, measurement=replace(was.measurement, mode="events")), tmp_path).cases
    assert math.isnan(case.estimate.shown.middle)


def test_folders_without_records_and_of_a_newer_schema_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(CompareError, match=r"no records\.jsonl"):
        compare.read_side(tmp_path / "empty")
    folder = nights.write(tmp_path / "new", block())
    folder.records.write_text(json.dumps(block()[0].to_json() | {"schema": 99}))
    with pytest.raises(CompareError, match="newer than this jfabench reads"):
        compare.read_side(folder.root)


# Measured in turns ---------------------------------------------------------------------------------------------------

Trees = Callable[..., tuple[Tree, Tree]]


@pytest.fixture
def two(tmp_path: Path) -> Trees:
    def make(b: dict[str, Any] | None = None, **a: Any) -> tuple[Tree, Tree]:
        first, second = fake_tree.make(tmp_path / "A", **a), fake_tree.make(tmp_path / "B", **(b or a))
        return Tree("A", first), Tree("B", second, "abc")

    return make


def plan(trees: tuple[Tree, Tree], device: str = "cpu", pairs: int = 3) -> interleaved.Plan:
    sweep = load_sweep("jagged.yaml", "cpu", only=["reference", "sdpa_padded"], directions=["fwd"])
    return interleaved.Plan(trees, sweep.cases[:6], MeasurePolicy(warmup_seconds=0.25), device, pairs)  # type: ignore[call-arg]


def turns(tmp_path: Path) -> list[list[Any]]:
    return [json.loads(line) for line in (tmp_path / "turns.jsonl").read_text().splitlines()]


def test_builds_take_turns_in_fresh_processes(two: Trees, tmp_path: Path) -> None:
    interleaved.measure(plan(two()), tmp_path / "out")
    taken = turns(tmp_path)
    visits = [name for name, _, _, provider, _ in taken if provider == "reference"]  # each visit has both providers
    assert "".join(visits) == "ABBAAB" + "BAABBA" + "ABBAAB"  # three shapes in each of three pairs
    processes = {(name, process) for name, process, *_ in taken}
    assert len(processes) == 6
    first, second = (compare.read_side(tmp_path / "out" / name) for name in "ab")
    assert [len(side) for side in (first, second)] == [3, 3]
    assert {r.env["commit"] for block in second for r in block.values()} == {"abc"}
    assert {r.worker for block in first for r in block.values()} == {p for name, p in processes if name == "A"}


def test_on_a_gpu_all_processes_are_warmed_up_first_and_that_is_thrown_away(two: Trees, tmp_path: Path) -> None:
    interleaved.measure(plan(two(gpu="NVIDIA H200"), "cuda", pairs=2), tmp_path / "out")
    taken = turns(tmp_path)
    warm = [turn for turn in taken if turn[4] == 0]
    assert warm == taken[: len(warm)]
    assert len({process for _, process, *_ in warm}) == 4
    assert {process for _, process, *_ in taken[len(warm) :]} == {process for _, process, *_ in warm}
    assert {json.dumps(turn[2]) for turn in warm} == {json.dumps(taken[-1][2] | {"max_len": 64, "fill": 0.1})}
    assert sum(len(block) for block in compare.read_side(tmp_path / "out" / "a")) == 12


def test_what_is_slower_is_measured_again_and_named(two: Trees, tmp_path: Path) -> None:
    trees = two({"seconds": {"sdpa_padded": 1.05e-3}})
    found = compare.measured(plan(trees), tmp_path / "out", repeated_pairs=5)
    named = {case.case.provider for case in found.of("slower")}
    assert named == {"sdpa_padded"}
    assert len(found.of("slower")) == 3
    assert {(c.case.provider, c.stage, c.blocks.pairs) for c in found.cases} == {
        ("reference", "first", 3),
        ("sdpa_padded", "repeated", 5),
    }
    again = compare.read_side(tmp_path / "out" / "repeated" / "a")
    assert len(again) == 5
    assert compare.from_folders(tmp_path / "out" / "a", tmp_path / "out" / "b").cases == found.cases


def test_a_build_is_the_same_as_itself(two: Trees, tmp_path: Path) -> None:
    found = compare.measured(plan(two()), tmp_path / "out", repeated_pairs=4)
    assert not found.regressed
    noise = compare.measured_noise(found, tmp_path / "out")
    assert 0.0002 < noise.process_sd < 0.004  # five samples that scatter by 0.2% have a median that scatters by 0.1%
    assert noise.floor < 0.01


def test_without_a_second_stage_the_first_pairs_decide(two: Trees, tmp_path: Path) -> None:
    found = compare.measured(plan(two({"seconds": {"reference": 2e-3}})), tmp_path / "out", repeated_pairs=0)
    assert {(case.case.provider, case.stage) for case in found.of("slower")} == {("reference", "only")}
    assert not (tmp_path / "out" / "repeated").exists()


def test_a_case_that_fails_is_not_tried_again_in_every_pair(two: Trees, tmp_path: Path) -> None:
    found = compare.measured(plan(two({"status": {"reference": "failed"}})), tmp_path / "out", repeated_pairs=0)
    assert {case.case.provider for case in found.broken} == {"reference"}
    b = [turn for turn in turns(tmp_path) if turn[0] == "B"]
    assert sum(turn[3] == "reference" for turn in b) == 3  # shapes, in the first pair
    assert sum(turn[3] == "sdpa_padded" for turn in b) == 9


def test_a_failure_in_a_used_process_counts_only_if_a_fresh_one_fails_too(two: Trees, tmp_path: Path) -> None:
    found = compare.measured(plan(two(status={"reference": "failed when used"})), tmp_path / "out", repeated_pairs=0)
    assert {case.status for case in found.cases} == {("ok", "ok")}
    assert not found.broken


def test_results_are_not_overwritten(two: Trees, tmp_path: Path) -> None:
    side(tmp_path / "out" / "a", block())
    with pytest.raises(CompareError, match="holds a comparison already"):
        compare.measured(plan(two()), tmp_path / "out")


def test_a_block_is_one_round_unless_asked_otherwise() -> None:
    policy = MeasurePolicy(rounds=4, target=0.01)  # type: ignore[call-arg]
    assert interleaved.block_policy(policy).rounds == 1
    assert interleaved.block_policy(policy).target == 0.5
    assert interleaved.block_policy(policy, ["measure.rounds=4"]).rounds == 4
    assert interleaved.block_policy(policy, ["measure.target=0.01"]).target == 0.01


# The command ---------------------------------------------------------------------------------------------------------


def test_the_command_measures_two_trees(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = fake_tree.make(tmp_path / "A")
    b = fake_tree.make(tmp_path / "B", {"sdpa_padded": 1.2e-3})
    grid = ["--config", "jagged.yaml", "--device", "cpu", "--only", "sdpa_padded", "--direction", "fwd"]
    options = [*grid, "--set", "lengths.max_len=64", "--pairs", "2", "--repeat", "4"]
    out = tmp_path / "out"
    assert main(["compare", str(a), str(b), *options, "--out", str(out)]) == 1
    shown = capsys.readouterr().out
    assert "3 slower" in shown
    assert "+20." in shown
    rows = (out / "comparison.csv").read_text().splitlines()
    assert len(rows) == 4
    assert "slower" in (out / "comparison.html").read_text()
    assert main(["compare", "--aa", str(a), *options, "--out", str(tmp_path / "aa")]) == 0
    assert "noise floor" in capsys.readouterr().out
    stored = json.loads(compare.noise_path().read_text())
    assert [noise["cases"] for noise in stored.values()] == [3]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["compare"], "needs A and B"),
        (["compare", "a", "b", "c"], "needs A and B"),
        (["compare", "--aa", "a", "b"], "one build at most"),
        (["compare", "main", "other"], "--config"),
        (["compare", "--aa"], "--config"),
        (["compare", "--aa", "--config", "jagged.yaml", "--repeat", "1"], "tells nothing about chance"),
        (["compare", "no-such-thing", ".", "--config", "jagged.yaml", "--device", "cpu"], "no source tree"),
        (["compare", ".", ".", "--config", "nowhere.yaml", "--device", "cpu"], "no sweep file"),
        (["compare", "a", "b", "--out", " "], "--out needs the name of a folder"),
    ],
)
def test_mistakes_are_explained(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert words in capsys.readouterr().err


def test_a_result_folder_beside_something_else_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = side(tmp_path / "a", block())
    assert main(["compare", str(a), str(tmp_path / "typo")]) == 2
    assert f"{tmp_path / 'typo'} is none (it has no records.jsonl)" in capsys.readouterr().err
    assert main(["compare", "--aa", str(a), "--config", "jagged.yaml"]) == 2
    assert "is a result folder: name a revision" in capsys.readouterr().err


def test_an_interrupted_comparison_says_how_to_compare_what_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(plan: interleaved.Plan, root: Path, say: Any) -> None:
        for name in interleaved.SIDES:
            side(root / name, block(), block())
        raise KeyboardInterrupt

    monkeypatch.setattr(interleaved, "measure", interrupted)
    tree, out = str(fake_tree.make(tmp_path / "A")), tmp_path / "out"
    assert main(["compare", "--aa", tree, "--config", "jagged.yaml", "--device", "cpu", "--out", str(out)]) == 130
    message = capsys.readouterr().err
    assert message.strip().endswith(f"compare {out / 'a'} {out / 'b'}")
    assert main(["compare", str(out / "a"), str(out / "b"), "--out", str(tmp_path / "late")]) == 0


def test_a_comparison_interrupted_before_both_sides_have_a_case_keeps_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = str(fake_tree.make(tmp_path / "A"))
    for number, others in enumerate((None, [nights.record(nights.case(3), 1e-3, nights.night(0))])):

        def interrupted(plan: interleaved.Plan, root: Path, say: Any, others: Any = others) -> None:
            side(root / "a", block())
            if others is not None:
                side(root / "b", others)
            raise KeyboardInterrupt

        monkeypatch.setattr(interleaved, "measure", interrupted)
        words = ["--config", "jagged.yaml", "--device", "cpu", "--out", str(tmp_path / f"out{number}")]
        assert main(["compare", "--aa", tree, *words]) == 130
        assert capsys.readouterr().err.strip().endswith("Nothing was measured on both sides yet.")


def test_a_full_disk_is_named_with_the_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = side(tmp_path / "a", block())
    (tmp_path / "file").write_text("")
    assert main(["compare", str(a), str(a), "--out", str(tmp_path / "file")]) == 3
    assert "choose another folder with --out" in capsys.readouterr().err


MEASURING = {
    "--config": "jagged.yaml",
    "--only": "tlx_jfa",
    "--direction": "fwd",
    "--measure": "wall",
    "--device": "auto",
    "--set": "batch=1",
    "--pairs": "4",  # of these the default is no better than another value
    "--repeat": "8",
    "--timeout": "300",
}


def refused(folder: Path, *words: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["compare", str(folder), str(folder), *words]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(("option", "value"), [*MEASURING.items(), ("--repeat", "0")])
def test_result_folders_are_not_measured_again(
    option: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(side(tmp_path / "a", block()), option, value, capsys=capsys)
    assert said == f"jfabench: {option}: result folders are compared as they are; leave it out\n"


def test_all_options_that_do_not_fit_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(side(tmp_path / "a", block()), "--pairs", "3", "--set", "batch=1", capsys=capsys)
    assert said == "jfabench: --set, --pairs: result folders are compared as they are; leave it out\n"


def test_a_comparison_of_nothing_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A gate must not pass because no case was measured."""
    none = [replace(r, status="unavailable", reason="needs a GPU", measurement=None) for r in block()]
    for name in "ab":
        side(tmp_path / name, none)
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert "nothing was measured on both sides" in " ".join(capsys.readouterr().out.split())


def options() -> dict[str, argparse.Action]:
    parsers = next(a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return {word: option for option in parsers.choices["compare"]._actions for word in option.option_strings}


def test_there_are_no_other_options() -> None:
    """A new one is for measuring, or is used for result folders, too: then it stands here."""
    assert options().keys() == MEASURING.keys() | {"--out", "--aa", "-h", "--help"}


def test_defaults_are_those_that_the_help_names() -> None:
    for name, value in compare_command.DEFAULTS.items():
        assert f"(default: {value if isinstance(value, str) else format(value, 'g')})" in options()[f"--{name}"].help
    assert (compare_command.DEFAULTS["pairs"], compare_command.DEFAULTS["repeat"]) == (
        compare.PAIRS,
        compare.REPEATED_PAIRS,
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], (4, 8, 300.0)),
        (["--pairs", "2", "--repeat", "0", "--timeout", "7"], (2, 0, 7.0)),
    ],
)
def test_builds_are_measured_as_asked(
    words: list[str], expected: tuple[int, int, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = (fake_tree.make(tmp_path / name) for name in "AB")
    asked: list[Any] = []

    def measured(plan: interleaved.Plan, root: Path, *, repeated_pairs: int, **_: Any) -> Comparison:
        asked.append((plan.pairs, repeated_pairs, plan.timeout))
        return compare.from_blocks(("A", "B"), ([], []), paired=True)

    monkeypatch.setattr(compare, "measured", measured)
    monkeypatch.setattr("jfabench.devices.choose_device", lambda wanted: asked.append(wanted) or ("cpu", ""))
    main(["compare", str(a), str(b), "--config", "jagged.yaml", "--out", str(tmp_path / "out"), *words])
    assert asked == ["auto", expected]
