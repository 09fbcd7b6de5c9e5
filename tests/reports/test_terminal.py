"""The table in the terminal: what it says, what is bold, and that it fits."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
import synthetic
from rich.console import Console

from jfabench.records import Case, Record
from jfabench.reports import derive, terminal
from jfabench.reports.figures import CPU_NOTE
from jfabench.reports.load import load


def printed(table: object, width: int, *, color: bool = False) -> list[str]:
    stream = io.StringIO()
    console = Console(
        width=width, file=stream, force_terminal=color, color_system="standard" if color else None, no_color=False
    )
    console.print(table)
    return stream.getvalue().splitlines()


@pytest.mark.parametrize("width", [50, 80, 100, 200])
def test_it_fits_and_shows_every_case(width: int) -> None:
    rows = derive.table(synthetic.grid(), synthetic.CEILINGS, "fa4_kernel")
    lines = printed(terminal.render(rows, width), width)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert (text.count("oom"), text.count("unsup."), text.count("timeout"), text.count("wrong")) == (6, 15, 1, 2)
    fast = rows[rows["tflops"] >= 100]["tflops"]
    assert all(f"{value:.0f}" in text for value in fast)
    assert "M=256" in lines[0]  # what all shapes share stands in the title alone
    assert "M=256" not in "\n".join(lines[1:])


def test_the_fastest_right_result_of_each_shape_is_bold() -> None:
    records = synthetic.grid((512, 1024), (0.5,), providers=("fa4", "fa3", "fa4_kernel"), directions=("fwd",))
    rows = derive.table(records)
    lines = printed(terminal.render(rows, 80), 80, color=True)
    for n in (512, 1024):
        line = next(line for line in lines if line.split()[:1] == [str(n)])
        best = rows[rows["lengths.max_len"] == n]["tflops"].max()
        assert line.count("\x1b[1m") == 1
        assert f"\x1b[1m{best:.3g}" in line or f"\x1b[1m{best:.0f}" in line


def test_a_case_without_a_record_shows_a_dash() -> None:
    records = synthetic.grid((512, 1024), (0.5,), providers=("fa4", "fa3"), directions=("fwd",))
    line = next(line for line in printed(terminal.render(derive.table(records[:-1]), 80), 80) if "1024" in line)
    assert line.split()[-1] == "-"


def test_seeds_tell_shapes_apart() -> None:
    records = synthetic.grid((512,), (0.5,), providers=("fa4",), directions=("fwd",), seeds=(1, 2))
    lines = printed(terminal.render(derive.table(records), 80), 80)
    words = [line.split()[0] for line in lines if line.strip()]
    assert words[-4:-3] + words[-2:] == ["seed", "1", "2"]


def test_a_long_table_is_cut_and_says_so() -> None:
    records = synthetic.grid((512,), (0.5,), providers=("fa4",), directions=("fwd",), seeds=range(100))
    lines = printed(terminal.render(derive.table(records), 80), 80)
    assert sum(line.split()[:1] == [str(seed)] for line in lines for seed in range(100)) == terminal.MAX_CASES
    assert "and 40 more shapes" in " ".join(" ".join(lines).split())


def real_run() -> list[Record]:
    """Seven providers and three axes, with the labels that the operator gives, backward first."""
    records = synthetic.grid((512, 8192), (0.1, 0.9), (64, 256), (*synthetic.FRACTION, "tlx_jfa"), ("bwd", "fwd"))
    return [replace(r, inputs={"label": f"{r.inputs['label']} B={r.case.params['batch']} H=4"}) for r in records]


def test_a_real_run_fits_80_columns_with_its_providers_side_by_side() -> None:
    lines = printed(terminal.render(derive.table(real_run()), 80), 80)
    heading = next(line for line in lines if "fill" in line).split()
    assert heading[:4] == ["N", "fill", "M", "B"]
    assert sum(line.split()[:4] == ["8192", "0.9", "256", "256"] for line in lines) == 2
    assert "H=4" in lines[0]
    directions = [line.split()[4] for line in lines if line.split()[:1] in (["512"], ["8192"])]
    assert directions == ["fwd"] * 8 + ["bwd"] * 8


def test_two_grids_share_a_table_with_blanks_where_a_quantity_is_not_theirs() -> None:
    records = synthetic.grid((512,), (0.1, 0.5), providers=("fa4",)) + synthetic.dense((512, 4096), ("fa4",))
    lines = printed(terminal.render(derive.table(records), 80), 80)
    assert [line.split()[:-2] for line in lines if line.split()[:1] in (["512"], ["4096"])] == [
        ["512", "0.1", "256"],
        ["512", "0.5", "256"],
        ["512"],
        ["4096"],
    ]


def test_providers_come_in_the_order_asked_for() -> None:
    records = synthetic.grid((512, 1024), (0.5,), providers=("fa4", "fa3", "other"), directions=("fwd",))
    lines = printed(terminal.render(derive.table(records), 80, ["fa3", "absent", "fa4"]), 80)
    assert next(line for line in lines if "fa3" in line).split()[-3:] == ["fa3", "fa4", "other"]


def test_names_with_markup_are_shown_as_they_are() -> None:
    record = synthetic.grid((512,), (0.5,), providers=("fa4",), directions=("fwd",))[0]
    case = Case(record.case.operator, "[red]x[/]", "fwd", record.case.params)
    odd = replace(record, case=case, inputs={"label": "[bold]N"})
    text = "\n".join(printed(terminal.render(derive.table([odd]), 80), 80))
    assert "[red]x[/]" in text
    assert "[bold]N" in text


def test_cpu_results_are_labelled() -> None:
    records = [replace(r, env={"gpu": None, "cpu": "X"}) for r in synthetic.grid((512,), (0.5,))]
    assert CPU_NOTE in printed(terminal.render(derive.table(records), 100), 100)[0]


def test_show_prints_means_with_their_counts_and_the_warnings(tmp_path: Path) -> None:
    records = synthetic.grid()
    results = load([synthetic.write_folder(tmp_path, records, run=synthetic.manifest(200))])
    stream = io.StringIO()
    terminal.show(results, Console(width=300, file=stream))
    text = stream.getvalue()
    assert "bwd, mean speedup over fa4_kernel: " in text
    assert "(12 of 15 cases)" in text
    assert "! Unfinished: 180 of 200 cases" in text


def test_nothing_measured(tmp_path: Path) -> None:
    stream = io.StringIO()
    terminal.show(load([synthetic.write_folder(tmp_path, [])]), Console(width=80, file=stream))
    assert "no run.json" in stream.getvalue()
