"""The table in the terminal: what it says, what is bold, and that it fits."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
import synthetic
from rich.console import Console

from jfabench.records import Case
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
        line = next(line for line in lines if f"N={n}" in line)
        best = rows[rows["lengths.max_len"] == n]["tflops"].max()
        assert line.count("\x1b[1m") == 1
        assert f"\x1b[1m{best:.3g}" in line or f"\x1b[1m{best:.0f}" in line


def test_a_case_without_a_record_shows_a_dash() -> None:
    records = synthetic.grid((512, 1024), (0.5,), providers=("fa4", "fa3"), directions=("fwd",))
    line = next(line for line in printed(terminal.render(derive.table(records[:-1]), 80), 80) if "N=1024" in line)
    assert line.split()[-1] == "-"


def test_seeds_tell_shapes_apart() -> None:
    records = synthetic.grid((512,), (0.5,), providers=("fa4",), directions=("fwd",), seeds=(1, 2))
    text = "\n".join(printed(terminal.render(derive.table(records), 80), 80))
    assert "seed=1" in text
    assert "seed=2" in text


def test_a_long_table_is_cut_and_says_so() -> None:
    records = synthetic.grid((512,), (0.5,), providers=("fa4",), directions=("fwd",), seeds=range(100))
    lines = printed(terminal.render(derive.table(records), 80), 80)
    assert sum("seed=" in line for line in lines) == terminal.MAX_CASES
    assert "and 40 more shapes" in " ".join(" ".join(lines).split())


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
