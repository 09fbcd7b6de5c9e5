"""Schedules without a GPU: tiles against the mask itself, policies against plain loops, fits against made-up costs."""

from __future__ import annotations

import csv
import heapq
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jfabench import calibration, cli, schedule_run, tile_costs
from jfabench.kernels.attention import config_sm90
from jfabench.kernels.attention.problem import make_problem
from jfabench.schedule import (
    POLICIES,
    Policy,
    Schedule,
    Shape,
    Tiles,
    compared,
    count_tiles,
    intervals,
    schedule,
    tiles,
)
from jfabench.sweep import load_sweep
from jfabench.tile_costs import Sample, calibrate, predicted

FORWARD, BACKWARD = Shape(False, 128, 64), Shape(True, 128, 64)
ROOT = Path(__file__).resolve().parent.parent

lengths = st.lists(st.integers(0, 700), min_size=1, max_size=12).map(np.array)


# tiles


@given(lengths, st.integers(1, 300), st.booleans(), st.sampled_from([(-1, -1), (-1, 0), (40, 0), (100, 30)]))
@settings(max_examples=60)
def test_tiles_have_the_blocks_that_the_mask_lets_them_see(
    keys: np.ndarray, m: int, over_keys: bool, bounds: tuple[int, int]
) -> None:
    shape = BACKWARD if over_keys else FORWARD
    queries = np.full(len(keys), m)
    found = tiles(queries, keys, shape, heads=2, bounds=bounds)
    at = 0
    for b, n in enumerate(keys.tolist()):
        i, j = np.arange(m)[:, None] + n - m, np.arange(n)[None, :]
        left, right = bounds
        seen = np.ones((m, n), bool)
        seen &= (j >= i - left) if left >= 0 else True
        seen &= (j <= i + right) if right >= 0 else True
        seen = seen.T if over_keys else seen
        for block in range(-(-len(seen) // shape.tile)):
            rows = seen[block * shape.tile : (block + 1) * shape.tile]
            blocks = {int(column) // shape.step for column in np.flatnonzero(rows.any(axis=0))}
            for head in range(2):
                tile = found.sequence[at], found.head[at], found.block[at]
                assert tile == (b, head, block)
                # Whole tiles are asked what they see, and a kernel does not know that a sequence's last is not whole.
                assert max(len(blocks), 1) <= found.steps[at] <= max(len(blocks), 1) + 2
                if bounds == (-1, -1):
                    assert found.steps[at] == max(len(blocks), 1)
                at += 1
    assert at == len(found)


@given(lengths, st.integers(0, 300), st.booleans(), st.integers(1, 3))
@settings(max_examples=30)
def test_tiles_can_be_counted_without_making_them(keys: np.ndarray, m: int, over_keys: bool, heads: int) -> None:
    shape = BACKWARD if over_keys else FORWARD
    queries = np.full(len(keys), m)
    assert count_tiles(queries, keys, shape, heads) == len(tiles(queries, keys, shape, heads))


def test_a_group_of_query_heads_makes_steps_of_the_backward() -> None:
    keys = np.array([130])
    (one, four) = (tiles(np.array([256]), keys, BACKWARD, 1, group).steps.tolist() for group in (1, 4))
    assert (one, four) == ([4, 4], [16, 16])


# policies


def tiles_of(steps: list[int], sequence: list[int] | None = None) -> Tiles:
    n = len(steps)
    zeros = np.zeros(n, np.int64)
    return Tiles(np.array(sequence or range(n)), zeros, zeros, np.array(steps))


def by_hand(costs: list[float], programs: int, policy: Policy) -> list[list[float]]:
    """The costs that each program gets, in order."""
    listed = costs if policy in ("none", "dynamic") else sorted(costs, reverse=True)
    got: list[list[float]] = [[] for _ in range(programs)]
    if policy in ("lpt", "dynamic"):
        free = [(0.0, p) for p in range(programs)]
        for cost in listed:
            at, p = heapq.heappop(free)
            got[p].append(cost)
            heapq.heappush(free, (at + cost, p))
        return got
    for turn in range(0, len(listed), programs):
        for lane, cost in enumerate(listed[turn : turn + programs]):
            backwards = policy == "zigzag" and turn // programs % 2
            got[programs - 1 - lane if backwards else lane].append(cost)
    return got


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(1, 9), st.sampled_from(POLICIES))
def test_policies_agree_with_plain_loops(steps: list[int], sms: int, policy: Policy) -> None:
    work = tiles_of(steps)
    cost = work.steps + 0.5
    (placed,) = compared(work, cost, work.steps, [policy], sms)
    programs = min(sms, len(steps))
    expected = by_hand([float(value) for value in cost], programs, policy)
    for program, costs in enumerate(expected):
        mine = np.flatnonzero(placed.program == program)
        order = mine[np.argsort(placed.start[mine])]
        assert cost[order].tolist() == costs
        # Without gaps, from 0 on.
        np.testing.assert_allclose(placed.start[order], np.cumsum([0.0, *costs])[:-1])
    assert placed.makespan == pytest.approx(max(map(sum, expected)))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(1, 9), st.integers(1, 2))
def test_no_policy_beats_the_bound_and_lists_stay_below_twice_it(steps: list[int], sms: int, residents: int) -> None:
    work = tiles_of(steps)
    for placed in compared(work, work.steps.astype(float), work.steps, POLICIES, sms, residents):
        assert placed.over_bound >= 1 - 1e-9
        assert placed.busy_share <= 1 + 1e-9
        assert placed.imbalance >= 1 - 1e-9
        if placed.policy in ("lpt", "dynamic"):
            assert placed.makespan <= 2 * placed.lower_bound + 1e-9  # Graham's bound for list scheduling


def test_multiprocessors_without_work_count() -> None:
    work = tiles_of([3, 1])
    (placed,) = compared(work, work.steps.astype(float), work.steps, ["lpt"], sms=4)
    assert (placed.makespan, placed.lower_bound) == (3.0, 3.0)
    assert placed.imbalance == 3.0  # 3 of an average of 1
    assert placed.busy_share == pytest.approx(4 / 12)


def test_a_batch_without_tiles() -> None:
    work = tiles(np.array([4]), np.array([0]), BACKWARD, 2)
    (placed,) = compared(work, work.steps.astype(float), np.array([4]), ["zigzag"], 132)
    assert (len(work), placed.makespan, placed.over_bound, placed.imbalance, placed.busy_share) == (0, 0, 1, 1, 1)


def test_no_multiprocessors_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        schedule(tiles_of([1]), np.ones(1), np.arange(1), "none", 0)


def test_the_order_is_that_of_the_kernels_list() -> None:
    """Heaviest sequence first, ties in the order of the batch, the last block of queries first, heads innermost."""
    work = tiles(np.full(3, 200), np.array([64, 640, 64]), FORWARD, 2)
    order = work.weights_first(np.array([64, 640, 64]))
    listed = [(int(work.sequence[i]), int(work.block[i]), int(work.head[i])) for i in order]
    assert listed == [(b, block, head) for b in (1, 0, 2) for block in (1, 0) for head in (0, 1)]


def test_the_table_of_intervals() -> None:
    work = tiles_of([5, 1, 1], [0, 1, 1])
    (placed,) = compared(work, work.steps * 2.0, np.array([5, 1]), ["lpt"], 2)
    found = intervals(work, placed)
    assert found[["sm", "start", "end", "label", "sequence"]].to_numpy().tolist() == [
        [0, 0, 10, 5, 0],
        [1, 0, 2, 1, 1],
        [1, 2, 4, 1, 1],
    ]


# calibration


def samples(
    a: float, b: float, c: float, noise: float, seed: int = 0, batches: tuple[int, ...] = (40, 90)
) -> list[Sample]:
    rng = np.random.default_rng(seed)
    found = []
    for batch in batches:
        for longest in (200, 900, 3000):
            keys = rng.integers(1, longest, batch)
            work = tiles(np.full(batch, 256), keys, FORWARD, 4)
            (placed,) = compared(work, np.ones(len(work)), keys, ["zigzag"], 132)
            sample = Sample.of(work, placed, 0.0)
            found.append(Sample(sample.tiles, sample.steps, predicted(sample, a, b, c) * (1 + noise * rng.normal())))
    return found


def test_costs_are_found_again() -> None:
    fit = calibrate(samples(1.5e-6, 0.9e-6, 20e-6, noise=0.0))
    np.testing.assert_allclose((fit.a, fit.b, fit.c), (1.5e-6, 0.9e-6, 20e-6), rtol=1e-6)
    assert fit.residual < 1e-9
    noisy = calibrate(samples(1.5e-6, 0.9e-6, 20e-6, noise=0.01), c=20e-6)
    np.testing.assert_allclose((noisy.a, noisy.b), (1.5e-6, 0.9e-6), rtol=0.1)
    assert noisy.residual < 0.05
    assert noisy.c == 20e-6


def test_the_makespan_is_fitted_and_not_the_average() -> None:
    """One long sequence decides when a call ends: an average of the work would put its time down to the tiles."""
    sample = Sample(np.array([1.0, 1.0]), np.array([100.0, 2.0]), 101.0)
    other = Sample(np.array([4.0, 4.0]), np.array([8.0, 8.0]), 12.0)
    fit = calibrate([sample, other], c=0.0)
    np.testing.assert_allclose((fit.a, fit.b), (1.0, 1.0), rtol=1e-9)


def test_no_cost_is_negative() -> None:
    fit = calibrate(samples(0.0, 1e-6, 50e-6, noise=0.02, seed=3))
    assert min(fit.a, fit.b, fit.c) >= 0


def test_what_cannot_be_told_apart() -> None:
    equal = [Sample(np.array([n]), np.array([4.0 * n]), 4.0 * n) for n in (1.0, 2.0, 5.0)]
    fit = calibrate(equal)  # four steps in every tile: the steps get it all
    np.testing.assert_allclose((fit.a, fit.b, fit.c), (0.0, 1.0, 0.0), atol=1e-9)
    with pytest.raises(ValueError, match="2 measured cases cannot tell 3 costs apart"):
        calibrate(equal[:2])


def test_a_greedy_policy_cannot_be_calibrated_with() -> None:
    work = tiles_of([1, 2])
    (placed,) = compared(work, np.ones(2), work.steps, ["lpt"], 2)
    with pytest.raises(ValueError, match="lpt"):
        Sample.of(work, placed, 1.0)


def test_the_known_costs_are_what_the_committed_results_give() -> None:
    fits = calibration.fit_folder(ROOT / "reports" / "results" / "h200" / "jagged")
    found = {(f.gpu, f.direction, f.queries, f.shape): f for f in fits}
    assert {queries for _, _, queries, _ in found} == {64, 256, 512}
    for known in tile_costs.KNOWN:
        queries = known.queries or (64 if known.shape.tile == 64 else 256)
        fit = found[known.gpu, known.direction, queries, known.shape]
        assert len(fit.labels) == known.cases
        values = fit.fit.a, fit.fit.b, fit.fit.c
        np.testing.assert_allclose(values, (known.a, known.b, known.c), rtol=0.01, atol=1e-9)
        assert fit.fit.residual == pytest.approx(known.residual, abs=0.001)
    told = list(calibration.lines(fits))
    assert any("b = 1.554 us a step" in line and "12 cases, off by 2.0% at most" in line for line in told)


def test_the_model_where_nothing_is_measured() -> None:
    wide = Shape(False, 128, 128)
    known = tile_costs.known_cost("fwd", 128, wide)
    model = tile_costs.model("fwd", 128, wide)
    assert known is not None
    assert (model.gpu, model.b, model.c, model.shape) == ("", 1.0, 0.0, wide)
    assert model.a == pytest.approx(known.a / known.b)
    assert tile_costs.known_cost("fwd", 64, wide) is None
    backward = Shape(True, 128, 64)
    known_for = {m: tile_costs.known_cost("bwd", 128, backward, queries=m) for m in (64, 128, 256, 512)}
    assert {m: cost and cost.queries for m, cost in known_for.items()} == {64: 64, 128: None, 256: 256, 512: 512}
    assert known_for[128] is None is tile_costs.known_cost("bwd", 128, backward)
    assert tile_costs.known_cost("fwd", 128, wide, "NVIDIA B200") is None
    low = tile_costs.model("fwd", 128, Shape(False, 64, 64, 2))
    assert low.a == pytest.approx(0.636 / 0.914)  # of the first tiles with steps of 64 keys


@pytest.mark.parametrize(
    ("direction", "head_dim", "m", "n", "shape"),
    [
        ("fwd", 128, 256, 1024, Shape(False, 128, 128)),
        ("fwd", 128, 256, 200, Shape(False, 128, 64)),
        ("fwd", 128, 64, 1024, Shape(False, 64, 64, 2)),
        ("bwd", 128, 256, 1024, Shape(True, 128, 64)),
        ("bwd", 64, 256, 1024, Shape(True, 128, 128)),
    ],
)
def test_the_tiles_of_the_default_configuration(direction: str, head_dim: int, m: int, n: int, shape: Shape) -> None:
    queries, keys = np.full(5, m), np.full(5, n)
    assert tile_costs.default_shape(direction, head_dim, queries, keys, (-1, -1), broadcast=True) == shape


@pytest.mark.parametrize("broadcast", [True, False])
@pytest.mark.parametrize("n", [100, 256, 300, 512])
def test_the_tiles_are_those_of_a_call_with_such_queries(n: int, broadcast: bool) -> None:
    ends = torch.tensor([0, n, 2 * n])
    q, k = torch.zeros(n if broadcast else 2 * n, 1, 128), torch.zeros(2 * n, 1, 128)
    problem = make_problem(q, k, k, ends, None if broadcast else ends, 0.1, (-1, -1), False)
    config = config_sm90.default(problem.kind("sm90", "forward"))
    shared = ["broadcast_q=true", f"q_len={n}"] if broadcast else []
    given_here = ["batch=2", "heads=1", f"lengths.length=[{n}]", *shared]
    (work,) = schedule_run.of_sweep(load_sweep("dense.yaml", settings=given_here, directions=["fwd"]))
    assert isinstance(config, config_sm90.ForwardConfig)
    assert work.shape == Shape(False, config.block_m, config.block_n, config.residents)


# the command


def run(*words: str) -> int:
    return cli.main(["schedule", *words])


def test_lengths_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "l.csv").write_text("tokens\n" + "\n".join(str(100 + 37 * i) for i in range(90)) + "\n")
    out = tmp_path / "out"
    words = ("--lengths", str(tmp_path / "l.csv"), "--direction", "fwd", "--direction", "bwd", "--tiles")
    assert run(*words, "--out", str(out)) == cli.OK
    said = capsys.readouterr().out
    assert "Predicted, not measured" in said
    assert "NVIDIA H200" in said
    with (out / "schedule.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    assert [(row["direction"], row["policy"]) for row in found] == [(d, p) for d in ("fwd", "bwd") for p in POLICIES]
    for row in found:
        assert row["unit"] == "s"
        assert float(row["predicted_call_s"]) > float(row["makespan"]) >= float(row["lower_bound"]) > 0
    with (out / "schedule_tiles.csv").open(newline="") as file:
        placed = [row for row in csv.DictReader(file) if row["policy"] == "none"]
    assert len(placed) == int(found[0]["tiles"]) + int(found[5]["tiles"])
    pictures = sorted(path.suffix for path in out.glob("schedule-*"))
    assert pictures == [".png", ".png", ".svg", ".svg"]


def test_another_device_gets_a_model_in_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "--config",
        "jagged.yaml",
        "--set",
        "q_len=64",
        "--set",
        "lengths.max_len=512",
        "--set",
        "lengths.fill=0.5",
    )
    assert run(*words, "--sms", "148", "--policy", "zigzag", "--direction", "fwd", "--out", str(tmp_path)) == cli.OK
    said = " ".join(capsys.readouterr().out.split())
    assert "not seconds: of this device and kernel nothing is measured" in said
    with (tmp_path / "schedule.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["unit"], row["cost_gpu"], row["predicted_call_s"], row["sms"]) == (
        "steps of 64 keys",
        "model",
        "",
        "148",
    )


def test_a_part_of_a_gpus_name_is_enough() -> None:
    cost = tile_costs.KNOWN[0]
    assert tile_costs.known_cost(cost.direction, cost.head_dim, cost.shape, "h200") == cost
    assert tile_costs.known_cost(cost.direction, cost.head_dim, cost.shape, "B200") is None


@pytest.mark.parametrize("count", ["0", "-1", "many", "1000000"])
def test_no_gpu_has_so_many_multiprocessors(count: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run("--lengths", "l.csv", "--sms", count)
    assert f"argument --sms: {count}: " in capsys.readouterr().err


def test_all_pairs_of_a_case_are_there() -> None:
    from jfabench.sweep import load_sweep

    settings_ = ["q_len=256", "lengths.max_len=1024", "lengths.fill=0.5"]
    works = schedule_run.of_sweep(load_sweep("jagged.yaml", "full", settings=settings_))
    assert [work.direction for work in works] == ["fwd", "bwd"]
    found = schedule_run.predict(works[0], 132, ["zigzag"])
    assert len(found.tiles) == 768 * 2 * 4
    assert int(found.tiles.steps.sum()) == int((-(-works[0].keys // found.cost.shape.step)).sum()) * 8
    assert isinstance(found.schedules[0], Schedule)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--lengths", "/no/such.csv"], "there is no file '/no/such.csv'"),
        (["--lengths", "/no/such.csv", "--out", " "], "--out needs"),
        (
            ["--config", "jagged.yaml", "--gpu", "NVIDIA B200"],
            "--gpu NVIDIA B200: no tile like those of fwd D=128 N=512",
        ),
        (["--lengths", "{}", "--q-len", "99999999"], "--q-len 99999999: 9,375,000 tiles"),
        (["--lengths", "{}", "--q-len", "9999999999"], "--q-len 9999999999: "),
        (["--lengths", "{}", "--q-len", "800000000"], "--q-len 800000000: batch * q_len (3 * 800000000) exceeds"),
        (["--lengths", "{}", "--q-len", "12800000", "--heads", "1024"], "--q-len 12800000: 307,200,000 tiles"),
        (["--lengths", "{}", "--q-len", "65536", "--heads", "1024"], "--heads 1024: 1,572,864 tiles"),
        (["--lengths", "{}", "--heads", "2000"], "--heads 2000: "),
        (["--lengths", "{}", "--column", "token"], "--column token: "),
        (["--lengths", "long.csv"], "--lengths long.csv: 1,200,000 tiles"),
        (["--lengths", "long.csv", "--q-len", "320"], "--lengths long.csv: 1,800,000 tiles"),
        (
            ["--lengths", "wide.csv", "--direction", "bwd", "--q-len", "99999999"],
            "--lengths wide.csv: 31,250,004 tiles",
        ),
        (["--config", "jagged.yaml", "--set", "heads=1024", "--set", "batch=4000"], " tiles (fwd N="),
        (["--calibrate", "/no/such"], "/no/such: records.jsonl cannot be read (No such file or directory)"),
        (["--lengths", "l.csv", "--set", "q_len=64"], "--set is for --config, and says nothing with --lengths"),
        (["--config", "jagged.yaml", "--q-len", "64"], "--q-len is for --lengths, and says nothing with --config"),
        (["--calibrate", "results", "--sms", "148"], "--sms says nothing with --calibrate"),
        (["--calibrate", "results", "--tiles"], "--tiles says nothing with --calibrate"),
        (["--calibrate", "results", "--out", "x"], "--out says nothing with --calibrate"),
    ],
)
def test_errors_are_one_sentence(
    words: list[str],
    part: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("few.csv").write_text("tokens\n100\n200\n300\n")
    Path("long.csv").write_text("7\n" * 150_000)
    Path("wide.csv").write_text("999999999\n30\n")
    assert run(*(word.format("few.csv") for word in words)) == cli.USAGE
    error = capsys.readouterr().err
    assert part in error
    assert error.count("\n") == 1
