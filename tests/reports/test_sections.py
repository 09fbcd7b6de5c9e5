"""Sections of the report from the files of the tuning commands: found, missing, damaged, hostile."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
import synthetic
from matplotlib.figure import Figure

from jfabench import inspect_kernels, ncu, schedule_run, waterfall
from jfabench.reports import html, pictures, sections
from jfabench.reports.sections import SOURCES, Section


def by_anchor(*folders: Path) -> dict[str, Section]:
    return {section.source.anchor: section for section in sections.sections(folders)}


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def test_an_empty_folder_has_none(tmp_path: Path) -> None:
    found = by_anchor(tmp_path)
    assert set(found) == {"counters", "timeline", "schedule", "waterfall", "inspect"}
    assert not any(section.found for section in found.values())


def test_columns_that_people_read_come_in_their_order(tmp_path: Path) -> None:
    write(
        tmp_path / "waterfall.csv",
        "seed,variant,label,median_s,saved,saved_low,text\n"
        "0,as shipped,N=8,0.000123456789,,,\n0,no mask,N=8,1e-4,0.19,,x\n",
    )
    (table,) = by_anchor(tmp_path)["waterfall"].tables
    assert table.columns == ("label", "variant", "median_s", "saved", "text")  # nothing in saved_low, seed is not asked
    assert table.numeric == (False, False, True, True, False)
    assert table.rows == (("N=8", "as shipped", "0.00012346", "", ""), ("N=8", "no mask", "0.0001", "0.19", "x"))


def test_all_columns_where_none_are_named_and_not_all_rows(tmp_path: Path) -> None:
    lines = "\n".join(f"{i},w{i}" for i in range(sections.MOST_ROWS + 5))
    write(tmp_path / "waits.csv", f"barrier,name\n{lines}\n")
    (table,) = by_anchor(tmp_path)["timeline"].tables
    assert (table.columns, len(table.rows), table.total) == (
        ("barrier", "name"),
        sections.MOST_ROWS,
        sections.MOST_ROWS + 5,
    )


def test_the_first_folder_that_has_files_counts(tmp_path: Path) -> None:
    write(tmp_path / "b" / "schedule.csv", "label,policy\nx,zigzag\n")
    write(tmp_path / "c" / "schedule.csv", "label,policy\ny,lpt\n")
    (table,) = by_anchor(tmp_path / "a", tmp_path / "b", tmp_path / "c")["schedule"].tables
    assert table.rows == (("x", "zigzag"),)


def test_pictures(tmp_path: Path) -> None:
    for i in range(sections.MOST_PICTURES + 1):
        pictures.save(Figure(figsize=(0.2, 0.2)), tmp_path / f"schedule-{i:02}")
    (tmp_path / "charts").mkdir()
    (tmp_path / "charts" / "timeline-a.png").write_bytes(b"<svg onload=alert(1)>")
    found = by_anchor(tmp_path)
    schedule = found["schedule"]
    assert (len(schedule.pictures), schedule.left_out) == (sections.MOST_PICTURES, 1)
    assert schedule.pictures[0].name == "schedule-00"
    head, _, data = schedule.pictures[0].data.partition(",")
    assert head == "data:image/png;base64"
    assert base64.b64decode(data) == (tmp_path / "schedule-00.png").read_bytes()
    assert found["timeline"].pictures == ()
    assert found["timeline"].problems == ("timeline-a.png could not be read: it is no PNG file",)


@pytest.mark.parametrize(
    ("content", "part"),
    [(b"\xff\xfe\x00", "can't decode"), (b"a,b\n1,2\n", "none of the columns"), (b"", "none of the columns")],
)
def test_a_damaged_file_is_said_and_does_not_stop_the_page(content: bytes, part: str, tmp_path: Path) -> None:
    (tmp_path / "inspect.csv").write_bytes(content)
    section = by_anchor(tmp_path)["inspect"]
    assert section.tables == ()
    assert part in section.problems[0]
    assert section.found


def test_the_page_shows_what_is_there_and_says_how_to_get_the_rest(tmp_path: Path) -> None:
    records = synthetic.grid((512,), (0.5,))
    folder = synthetic.write_folder(tmp_path / "run", records, run=synthetic.manifest(len(records)))
    attack = "<img src=x onerror=alert(1)>"
    write(folder.root / "waterfall.csv", f"label,variant,median_s,saved\nN=8,as shipped,1e-3,\nN=8,{attack},9e-4,0.1\n")
    pictures.save(Figure(figsize=(0.2, 0.2)), folder.root / "waterfall")
    before = html.build(folder).rows
    page = folder.report.read_text(encoding="utf-8")
    tuning = page.partition('<section aria-labelledby="tuning">')[2].partition("</section>")[0]
    assert "Wrong by design" in tuning
    assert 'alt="What each stage costs: waterfall"' in tuning
    assert attack not in page
    assert "&lt;img src=x onerror=alert(1)&gt;" in tuning
    for source in SOURCES:
        name, _, _ = source.command.partition(" --")
        assert (name in tuning) == (source.anchor != "waterfall"), source.anchor
    # They are in no speedup.
    for path in folder.root.glob("waterfall.*"):
        path.unlink()
    assert html.build(folder).rows.equals(before)
    assert "Wrong by design" not in folder.report.read_text(encoding="utf-8")


def test_every_source_has_a_command_and_files_of_its_own() -> None:
    files = [table.file for source in SOURCES for table in source.tables]
    assert len(set(files)) == len(files)
    for source in SOURCES:
        assert source.command.startswith("python -m jfabench ")
        assert source.command.endswith("--out DIR")


def test_columns_are_those_that_the_commands_write() -> None:
    asked = {table.file: set(table.columns) for source in SOURCES for table in source.tables}
    assert asked["inspect.csv"] <= set(inspect_kernels.COLUMNS)
    assert asked["schedule.csv"] <= set(schedule_run.COLUMNS)
    assert asked["waterfall.csv"] <= set(waterfall.COLUMNS)
    derived = {"label", "provider", "direction", "main_kernel", "launches_per_call", "imbalance", "dram_over_minimal"}
    derived |= {"local_bytes", "tflops", "roofline_fraction"}
    assert asked["counters_wide.csv"] <= {*ncu.BY_NAME, *derived}
