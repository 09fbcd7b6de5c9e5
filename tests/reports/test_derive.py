"""Rows against values computed by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
import synthetic
from hypothesis import given, settings
from hypothesis import strategies as st

from jfabench.folder import Ceilings
from jfabench.measure import decide
from jfabench.policy import MeasurePolicy
from jfabench.records import Case, Direction, Measurement, Record, Status, TensorCheck, Work
from jfabench.reports import derive

GPU = {"gpu": "GPU", "commit": "abcdef0123456789", "dirty": True}
CEILINGS = Ceilings("GPU", {"bf16": 100e12}, 1e12, "datasheet")


def make(
    provider: str,
    seconds: float = 0.01,
    *,
    n: int = 8,
    direction: Direction = "fwd",
    status: Status = "ok",
    work: Work | None = None,
    **changes: Any,
) -> Record:
    case = Case("op", provider, direction, {"dtype": "bf16", "lengths": {"n": n, "kind": "k"}, "window": [-1, 0]})
    rounds = tuple((seconds * f,) * 3 for f in (0.999, 1.0, 1.0, 1.001))
    measurement = Measurement("events", rounds, "precision", visit="one") if status == "ok" else None
    work = work or Work(4e11, 1e9)
    return replace(Record(case, status, "2026-01-01", env=GPU, work=work, measurement=measurement), **changes)


def timed(provider: str, rounds: list[float], **measurement: Any) -> Record:
    """A record of rounds of three equal samples each."""
    values: dict[str, Any] = {"mode": "events", "stopped_by": "precision", "visit": "one", **measurement}
    return make(provider, measurement=Measurement(rounds=tuple((seconds,) * 3 for seconds in rounds), **values))


def only(records: list[Record], **options: Any) -> pd.Series[Any]:
    return derive.table(records, **options).iloc[0]


def test_parameters_are_flattened_and_stand_between_label_and_status() -> None:
    row = derive.table([make("a")])
    assert derive.param_columns(row) == ["dtype", "lengths.n", "lengths.kind", "window"]
    assert row.iloc[0][["lengths.n", "window"]].tolist() == [8, "[-1,0]"]


def test_a_long_list_is_named_by_length_and_hash() -> None:
    text = derive.flatten({"lengths": {"values": list(range(100))}})["lengths.values"]
    assert text.startswith("100 values, sha256 ")
    assert text != derive.flatten({"lengths": {"values": list(range(99, -1, -1))}})["lengths.values"]


def test_speed() -> None:
    row = only([make("a", 0.01, work=Work(4e11, 1e9))])
    assert row["median_s"] == pytest.approx(0.01)
    assert row["tflops"] == pytest.approx(40.0)
    assert row["bytes_per_s"] == pytest.approx(1e11)
    assert row["low_s"] < 0.01 < row["high_s"]
    assert (row["samples"], row["rounds"], row["stopped_by"]) == (12, 4, "precision")


@pytest.mark.parametrize(("work", "least"), [(Work(4e11, 1e9), 0.004), (Work(1e11, 5e9), 0.005)])
def test_roofline_is_the_slower_of_computing_and_moving(work: Work, least: float) -> None:
    row = only([make("a", 0.01, work=work)], ceilings=CEILINGS)
    assert row["roofline_s"] == pytest.approx(least)
    assert row["roofline_fraction"] == pytest.approx(least / 0.01)
    assert row["ceiling_source"] == "datasheet"
    assert row["flags"] == "unchecked"


@pytest.mark.parametrize(
    "ceilings", [None, replace(CEILINGS, device="other GPU"), replace(CEILINGS, flops={"fp16": 1e14})]
)
def test_no_roofline_without_ceilings_of_this_device_and_dtype(ceilings: Ceilings | None) -> None:
    row = only([make("a")], ceilings=ceilings)
    assert math.isnan(row["roofline_fraction"])
    assert row["ceiling_source"] == ""


def test_faster_than_the_ceilings_is_flagged() -> None:
    assert "above-roofline" in only([make("a", 1e-4)], ceilings=CEILINGS)["flags"]


def test_speedup_is_of_the_same_shape_and_direction() -> None:
    records = [
        make("base", 0.02),
        make("a", 0.01),
        make("base", 0.09, n=9),
        make("a", 0.01, n=9),
        make("base", 0.08, direction="bwd"),
        make("a", 0.01, direction="bwd"),
    ]
    rows = derive.table(records, baseline="base")
    assert rows["speedup"].tolist() == pytest.approx([1, 2, 1, 9, 1, 8])
    assert (rows["speedup_low"] <= rows["speedup"]).all()
    assert (rows["speedup"] <= rows["speedup_high"]).all()
    assert rows["speedup_note"].tolist() == ["the baseline", ""] * 3


@pytest.mark.parametrize(
    ("base", "note"),
    [
        ([], "base has no record of this case"),
        ([make("base", direction="bwd")], "base has no record of this case"),
        ([make("base", n=9)], "base has no record of this case"),
        ([make("base", status="oom")], "base is oom"),
        ([make("base", env={"gpu": "another"})], "base ran on another GPU"),
        ([timed("base", [0.02] * 4, mode="profiler")], "base was measured in mode profiler"),
    ],
)
def test_no_speedup_without_a_comparable_baseline_and_the_reason_is_told(base: list[Record], note: str) -> None:
    row = only([make("a"), *base], baseline="base")
    assert math.isnan(row["speedup"])
    assert row["speedup_note"] == note


DRIFT = [1.0 + 0.04 * step / 11 for step in range(12)]


def test_identical_kernels_are_equally_fast_under_drift_though_the_baseline_stopped_earlier() -> None:
    row = only(
        [timed("a", [s * (1 + 1e-4 * (i % 2)) for i, s in enumerate(DRIFT)]), timed("base", DRIFT[:4])], baseline="base"
    )
    assert row["speedup"] == pytest.approx(1.0, abs=1e-4)
    assert row["speedup_low"] <= 1 <= row["speedup_high"] < 1.001
    assert "not-interleaved" not in row["flags"]


@pytest.mark.parametrize("visits", [("one", "two"), ("", ""), ("one", "")])
def test_rounds_of_two_visits_are_not_paired(visits: tuple[str, str]) -> None:
    own, base = [1.0, 1.01, 1.02, 1.03], [2.0, 2.02, 2.04, 2.06]
    rows = derive.table([timed("a", own, visit=visits[0]), timed("base", base, visit=visits[1])], baseline="base")
    assert rows["flags"].str.contains("not-interleaved").tolist() == [True, False]
    assert rows.loc[0, "speedup"] == pytest.approx(2.0)
    assert rows.loc[0, "speedup_low"] < 1.98
    assert (rows.loc[1, "speedup"], rows.loc[1, "speedup_low"]) == (1.0, 1.0)
    paired = only([timed("a", own), timed("base", base)], baseline="base")
    assert paired["speedup_high"] - paired["speedup_low"] < 1e-9


@pytest.mark.parametrize("spread", [0.0, 0.001, 0.003, 0.005, 0.02])
@pytest.mark.parametrize("rounds", [1, 2, 3, 4, 9])
def test_imprecise_is_what_the_shown_interval_says(spread: float, rounds: int) -> None:
    """And it is what ended sampling: `decide` asks the same question of the same rounds."""
    record = timed("a", [1.0 + spread * (-1) ** step for step in range(rounds)])
    assert record.measurement
    for target in (0.005, 0.01, 0.05):
        row = only([record], targets=[target])
        policy = MeasurePolicy(target=target, rounds=1, min_iterations=1, max_iterations=1, max_seconds=1e-9)
        ended = decide(record.measurement.rounds, policy)
        assert ("imprecise" in row["flags"]) == (ended != "precision")
        if "imprecise" not in row["flags"]:
            assert row["high_s"] - row["low_s"] <= target * row["median_s"]
        elif rounds >= 4:
            assert row["high_s"] - row["low_s"] > target * row["median_s"]


def test_without_a_manifest_the_default_precision_counts() -> None:
    assert MeasurePolicy().target == derive.DEFAULT_TARGET
    assert derive.table([make("a")])["target"].tolist() == [0.01]


def test_spans_and_gaps() -> None:
    def spanned(factor: float) -> Record:
        record = timed("a", [1.0] * 4, mode="profiler", spans=((factor,) * 3,) * 4, kernels_per_call=2.0)
        return replace(record, checks=(check("out"),))

    rows = derive.table([spanned(1.09), spanned(1.11), spanned(0.8), make("a")])
    assert rows["span_s"].tolist() == pytest.approx([1.09, 1.11, 0.8, math.nan], nan_ok=True)
    assert rows["flags"].tolist() == ["", "gaps", "", "unchecked"]


def test_forward_comes_first_whatever_was_measured_first() -> None:
    records = [make("a", direction=d) for d in ("fwd_bwd", "bwd", "fwd")]  # type: ignore[arg-type]
    rows = derive.table(records)
    assert derive.directions(rows) == ["fwd", "bwd", "fwd_bwd"]
    assert derive.summary(rows)["direction"].tolist() == ["fwd", "bwd", "fwd_bwd"]


def test_a_case_that_is_not_ok_has_no_speed_though_it_was_measured() -> None:
    measured = make("a").measurement
    row = only([make("a", status="wrong", measurement=measured, reason="out: bad"), make("base")], baseline="base")
    assert row["median_s"] == pytest.approx(0.01)
    assert pd.isna(row[["tflops", "bytes_per_s", "roofline_fraction", "speedup"]]).all()
    assert (row["status"], row["reason"], row["flags"]) == ("wrong", "out: bad", "")


def check(tensor: str, *, passed: bool = True, rel: float | None = 0.002) -> TensorCheck:
    return TensorCheck(tensor, passed, 0.01, rel, 0.1, 0.05)


def test_errors_and_what_was_not_checked() -> None:
    records = [
        make("a", checks=(check("out"), check("lse"))),
        make("b", checks=(check("out", rel=None),)),
        make("c", status="wrong", checks=(check("out", passed=False), check("lse"))),
        make("d", direction="bwd", checks=(check("dq"),)),
        make("e"),
    ]
    rows = derive.table(records)
    assert rows["not_checked"].tolist() == ["", "lse", "", "", "out lse"]
    assert rows["checks_passed"].tolist() == [True, True, False, True, pd.NA]
    assert rows["flags"].tolist() == ["", "partly-checked", "", "", "unchecked"]
    assert rows["out_rel"].tolist() == pytest.approx([0.002, math.nan, 0.002, math.nan, math.nan], nan_ok=True)
    assert rows.loc[3, "dq_max_abs"] == 0.01


def test_clocks_flags_and_machine() -> None:
    clocks = {"before": {"sm_mhz": 1980}, "after": {"sm_mhz": 1500}, "throttled": ["sw_power_cap"]}
    imprecise = Measurement("events", ((1.0, 1.0),), "time", kernels_per_call=3)
    row = only([make("a", clocks=clocks, measurement=imprecise, checks=(check("out"),), inputs={"sum_k": 7})])
    assert row["flags"] == "throttled imprecise single-round"
    assert (row["throttled"], row["clocks.before.sm_mhz"], row["clocks.after.sm_mhz"]) == ("sw_power_cap", 1980, 1500)
    assert (row["gpu"], row["commit"], row["kernels_per_call"], row["inputs.sum_k"]) == ("GPU", "abcdef012345+", 3, 7)


@pytest.mark.parametrize(
    ("env", "name"),
    [({"gpu": "X", "cpu": "Y"}, "X"), ({"gpu": None, "cpu": "Y"}, "CPU (Y)"), ({"gpu": None}, "CPU"), ({}, "")],
)
def test_device_names(env: dict[str, Any], name: str) -> None:
    assert derive.gpu_name(env) == name


def test_label_of_the_record_or_of_what_varies() -> None:
    labelled = make("a", inputs={"label": "mine"})
    assert derive.table([labelled, make("a", n=9)])["label"].tolist() == ["mine", "lengths.n=9"]


def test_no_records_at_all() -> None:
    rows = derive.table([], CEILINGS, "base")
    assert len(rows) == 0
    assert {"median_s", "tflops", "speedup", "flags", "label", "status"} <= set(rows.columns)
    assert derive.summary(rows).empty


def test_summary_averages_geometrically_over_comparable_cases_and_counts_the_others() -> None:
    records = [
        *(make("base", 0.01, n=n) for n in (1, 2, 3)),
        make("base", n=4, status="failed"),
        make("a", 0.01 / 2, n=1),
        make("a", 0.01 / 8, n=2),
        make("a", n=3, status="wrong"),
        make("a", 0.01, n=4),
        make("b", n=1, status="unsupported"),
    ]
    rows = derive.summary(derive.table(records, CEILINGS, "base")).set_index("provider")
    a = rows.loc["a"]
    assert a["speedup"] == pytest.approx(4.0)  # sqrt(2 * 8): case 3 is wrong, case 4 has no baseline
    assert (a["speedup_cases"], a["cases"], a["complete"]) == (2, 4, False)
    assert (a["ok"], a["wrong"]) == (3, 1)
    # Fractions 0.4 * (2, 8, 1) over its three ok cases.
    assert a["roofline"] == pytest.approx(0.4 * 16 ** (1 / 3))
    assert a["roofline_cases"] == 3
    assert math.isnan(rows.loc["b", "speedup"])
    assert (rows.loc["b", "speedup_cases"], rows.loc["b", "unsupported"]) == (0, 1)


def test_summary_by_a_parameter() -> None:
    records = [make(p, s, n=n) for p, s, n in [("base", 0.02, 1), ("a", 0.01, 1), ("base", 0.03, 2), ("a", 0.01, 2)]]
    rows = derive.summary(derive.table(records, baseline="base"), ["lengths.n"])
    means = {(row["lengths.n"], row["provider"]): row["speedup"] for _, row in rows.iterrows()}
    assert means == pytest.approx({(1, "base"): 1, (1, "a"): 2, (2, "base"): 1, (2, "a"): 3})
    assert rows["complete"].all()


@settings(max_examples=25)
@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=8), st.floats(0.1, 10))
def test_mean_speedup_does_not_depend_on_the_unit_and_inverts_with_the_baseline(
    ratios: list[float], unit: float
) -> None:
    records = [
        make(provider, seconds * unit, n=n)
        for n, ratio in enumerate(ratios)
        for provider, seconds in (("a", 1.0), ("b", ratio))
    ]
    forward = derive.summary(derive.table(records, baseline="b")).set_index("provider").loc["a", "speedup"]
    backward = derive.summary(derive.table(records, baseline="a")).set_index("provider").loc["b", "speedup"]
    assert forward == pytest.approx(math.exp(sum(map(math.log, ratios)) / len(ratios)), rel=1e-9)
    assert forward * backward == pytest.approx(1.0)


def test_environments_are_counted_once_each() -> None:
    found = derive.environments([make("a"), make("b"), make("c", env={"gpu": "other", "triton": {"fbtriton": "1"}})])
    assert found == [
        ({"gpu": "GPU", "commit": "abcdef0123456789", "dirty": True}, 2),
        ({"gpu": "other", "triton.fbtriton": "1"}, 1),
    ]


def test_a_realistic_sweep() -> None:
    rows = derive.table(synthetic.grid(), synthetic.CEILINGS, "fa4_kernel")
    assert len(rows) == 5 * 3 * 2 * 6
    ok = rows[rows["status"] == "ok"]
    assert ok["tflops"].between(1, 800).all()
    assert ok["roofline_fraction"].between(0, 1).all()
    assert not (rows["flags"][rows["status"] != "ok"] != "").any()
