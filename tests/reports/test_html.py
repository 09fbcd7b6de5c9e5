"""The report: what it says, and how it behaves in a real browser."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import synthetic
from screens import show_page

from jfabench.folder import ResultFolder
from jfabench.records import Record
from jfabench.reports import charts, figures, html, load
from jfabench.reports.load import Results

ATTACK = "</script><img src=x onerror=\"document.title='attacked'\"><b>&amp; {{ 7*7 }}"


class Page(HTMLParser):
    """The text of a page by section, its tags, and what it would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.sections: dict[str, str] = {}
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.section = ""
        self.raw = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.raw = tag if tag in ("script", "style") else ""
        self.handle_data(" ")
        if tag == "section":
            self.section = dict(attrs).get("aria-labelledby") or ""

    def handle_endtag(self, tag: str) -> None:
        self.raw = ""
        self.handle_data(" ")
        if tag == "section":
            self.section = ""

    def handle_data(self, data: str) -> None:
        if not self.raw:
            self.sections[self.section] = self.sections.get(self.section, "") + data

    def words(self, section: str) -> str:
        return " ".join(self.sections.get(section, "").split()).replace(" ,", ",")


def build(root: Path, records: list[Record], run: Any = "default", **options: Any) -> tuple[Results, Page, str]:
    run = synthetic.manifest(len(records)) if run == "default" else run
    results = html.build(synthetic.write_folder(root, records, run=run, **options))
    text = results.target.report.read_text(encoding="utf-8")
    return results, Page(text), text


def rows_of(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="rows">(.*?)</script>', text, re.DOTALL)
    assert found
    data: dict[str, Any] = json.loads(found[1])
    return data


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, Page, str]:
    return build(tmp_path_factory.mktemp("whole"), synthetic.grid())


def test_build_writes_table_charts_and_report(whole: tuple[Results, Page, str]) -> None:
    results, _, _ = whole
    names = {path.name for path in results.target.root.iterdir()}
    assert {"results.csv", "report.html", "charts"} <= names
    assert not [name for name in names if name.endswith(".part")]
    assert len(pd.read_csv(results.target.table)) == 180
    sizes = {path.name: path.stat().st_size for path in results.target.charts.iterdir()}
    assert set(sizes) == {f"{name}.{kind}" for name in ("speed", "speedup", "roofline") for kind in ("svg", "png")}
    assert max(sizes.values()) < 200_000


def test_the_page_loads_nothing(whole: tuple[Results, Page, str]) -> None:
    _, page, text = whole
    for tag, attributes in page.tags:
        for name in ("src", "href", "srcset", "action", "data"):
            value = attributes.get(name)
            assert value is None or value.startswith(("#", "data:")), (tag, value)
    assert not re.search(r"@import|url\((?!#)", text)
    policy = next(a["content"] for tag, a in page.tags if tag == "meta" and a.get("http-equiv"))
    assert policy
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:")


def test_the_summary_counts_and_averages(whole: tuple[Results, Page, str]) -> None:
    _, page, _ = whole
    words = page.words("summary")
    for count in ("180 cases", "156 ok", "2 wrong", "1 timeout", "6 oom", "15 unsupported"):
        assert count in words
    assert "only 12 of 15 cases" in words
    assert "all 15 of 15 cases" in words
    assert "flash-attention 4, without the sum of dQ over the batch" in words


def test_every_failure_stands_there_with_its_reason_and_cases(whole: tuple[Results, Page, str]) -> None:
    results, page, _ = whole
    words = page.words("failures")
    bad = results.rows[results.rows["status"] != "ok"]
    for reason in bad["reason"].unique():
        assert reason in words
    for direction, label in zip(bad["direction"], bad["label"], strict=True):
        assert f"{direction} {label}" in words


def test_the_method_names_mode_rule_ceilings_and_formula(whole: tuple[Results, Page, str]) -> None:
    words = whole[1].words("method")
    for text in ("mode profiler", "target: 0.01", "measured on", "bf16 800 TFLOP/s", "4,300 GB/s", "4 · D · H"):
        assert text in words


@pytest.mark.parametrize(
    ("workers", "told"), [("per_shape", "a process of its own"), ("shared", "until anything failed"), ("", "")]
)
def test_what_the_harness_cost_is_told_where_it_is_known(tmp_path: Path, workers: str, told: str) -> None:
    records = synthetic.grid((512,), (0.5,))
    _, page, _ = build(tmp_path / "old", records, run=synthetic.manifest(len(records), workers=workers))
    words = page.words("method")
    assert "not counting its first call" not in words, "older records do not say where the time went"
    assert ("the cost of the harness" in words) == bool(told)
    assert told in words
    spent = [replace(r, phases={"start": 1.0 + 5.0 * (i == 0) + 0.5 * (i == 3)}) for i, r in enumerate(records)]
    results, page, _ = build(tmp_path / "new", spent, run=synthetic.manifest(len(records), workers=workers))
    mean = (len(records) - 1 + 0.5) / (len(records) - 1)
    words = page.words("method")
    for text in (f"{mean:.1f} s on average", "1.5 s at most", "first case of all (6.0 s)"):
        assert text in words
    assert list(results.rows["overhead_s"]) == [r.phases["start"] for r in spent]


def test_the_environment_is_shown_once(whole: tuple[Results, Page, str]) -> None:
    words = whole[1].words("environment")
    assert words.count("NVIDIA H200") == 1
    assert "triton.fbtriton 3.7.4" in words


def test_the_table_data_are_those_of_the_rows(whole: tuple[Results, Page, str]) -> None:
    results, _, text = whole
    data = rows_of(text)
    columns = {column["key"]: column for column in data["columns"]}
    assert data["rows"] == 180
    assert list(columns)[:5] == ["lengths.fill", "lengths.max_len", "provider", "direction", "status"]
    provider = columns["provider"]
    assert [provider["words"][code] for code in provider["codes"]] == results.rows["provider"].tolist()
    speeds = pd.Series(columns["speed"]["data"], dtype=float)
    pd.testing.assert_series_equal(speeds, results.rows["tflops"], rtol=1e-4, check_names=False)
    assert columns["speed"]["label"] == "TFLOP/s"


def test_mixed_environments_are_set_side_by_side(tmp_path: Path) -> None:
    records = synthetic.grid((512,), (0.5,))
    records[1:3] = [replace(record, env={**synthetic.ENV, "gpu": "NVIDIA B200"}) for record in records[1:3]]
    _, page, _ = build(tmp_path, records)
    assert "2 different environments are mixed" in page.words("environment")
    assert "More than one device is mixed here" in page.words("summary")


def test_a_foreign_folder_says_how_to_get_what_is_missing(tmp_path: Path) -> None:
    _, page, _ = build(tmp_path, synthetic.grid((512, 1024)), run=None, ceilings=None)
    words = page.words("summary")
    assert "no run.json here" in words
    assert "Name one as baseline: in the sweep file" in words
    assert "python -m jfabench ceilings --out" in words
    assert "Geometric means" not in words  # of nothing
    assert [chart for chart in page.words("charts").split() if chart == "Speedup"] == []


def test_datasheet_ceilings_say_what_to_do_about_them(tmp_path: Path) -> None:
    ceilings = replace(synthetic.CEILINGS, source="datasheet")
    _, page, _ = build(tmp_path, synthetic.grid((512,), (0.5,)), ceilings=ceilings)
    for section in ("summary", "method"):
        words = page.words(section)
        assert "on the device, python -m jfabench ceilings --out DIR" in words
        assert "then python -m jfabench report DIR" in words


def test_spans_and_kernels_are_shown_and_explained(whole: tuple[Results, Page, str], tmp_path: Path) -> None:
    results, page, text = whole
    columns = {column["key"]: column for column in rows_of(text)["columns"]}
    spans = pd.Series(columns["span"]["data"], dtype=float)
    pd.testing.assert_series_equal(spans, results.rows["span_s"], rtol=1e-4, check_names=False)
    assert columns["kernels"]["label"] == "kernels per call"
    assert set(columns["kernels"]["data"]) == {1.0, 3.0, None}
    assert "favours a provider that launches many kernels" in page.words("method")
    assert "run at the same time count twice" in page.words("method")
    wall = [
        replace(r, measurement=replace(r.measurement, mode="wall", spans=(), kernels_per_call=None))
        for r in synthetic.grid((512,), (0.5,))
        if r.measurement
    ]
    _, page, text = build(tmp_path, wall)
    assert not {"span", "kernels"} & {column["key"] for column in rows_of(text)["columns"]}
    assert "favours" not in page.words("method")


def test_every_flag_is_explained(whole: tuple[Results, Page, str]) -> None:
    words = whole[1].words("method")
    for flag in load._FLAG_TEXTS:
        assert re.search(rf"\b{flag} ?[:,]", words), flag


def test_two_grids_have_means_of_their_own_and_share_the_table(tmp_path: Path) -> None:
    records = synthetic.grid((512, 1024), (0.1, 0.5)) + synthetic.dense((512, 4096))
    _, page, text = build(tmp_path, records)
    words = page.words("summary")
    assert "over the grid, lengths = fill" in words
    assert "over the grid, lengths = constant" in words
    assert "all 4 of 4 cases" in words
    assert "all 2 of 2 cases" in words
    columns = {column["key"]: column for column in rows_of(text)["columns"]}
    assert [column["label"] for column in columns.values()][:2] == ["fill", "N"]
    assert columns["lengths.max_len"]["data"] == [
        r.case.params["lengths"].get("max_len") or 512 for r in records[:48]
    ] + [r.case.params["lengths"]["length"] for r in records[48:]]
    assert columns["lengths.fill"]["data"][48:] == [None] * 24


def test_forward_comes_before_backward_everywhere(tmp_path: Path) -> None:
    results, page, text = build(tmp_path, synthetic.grid((512, 1024), (0.1, 0.5), directions=("bwd", "fwd")))
    words = page.words("summary")
    assert words.index("fwd speedup") < words.index("bwd speedup")
    assert words.index("fwd, fill 0.1") < words.index("bwd, fill 0.1")
    columns = {column["key"]: column for column in rows_of(text)["columns"]}
    assert columns["direction"]["words"] == ["fwd", "bwd"]
    assert columns["direction"]["codes"][0] == 1
    titles = [panel.title for chart in charts.draw(results).charts for panel in chart.panels]
    assert titles[:4] == [f"fill = {f}, {d}" for d in ("forward", "backward") for f in (0.1, 0.5)]


def test_a_build_that_fails_leaves_the_earlier_report_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results, _, text = build(tmp_path, synthetic.grid((512,), (0.5,)))
    table = results.target.table.read_text()
    write = Path.write_bytes

    def half(path: Path, content: bytes) -> int:
        write(path, content[: len(content) // 2])
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(OSError, match="no space"):
        html.build(results.target)
    assert results.target.report.read_text() == text
    assert results.target.table.read_text() == table
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.parametrize("records", [[], synthetic.grid((512,), (0.5,), providers=("fa3",), directions=("bwd",))])
def test_a_run_without_a_single_number_still_gives_a_page(tmp_path: Path, records: list[Record]) -> None:
    _, page, text = build(tmp_path, records, run=synthetic.manifest(5))
    assert f"Unfinished: {len(records)} of 5 cases" in page.words("summary")
    assert "nothing to draw" in page.words("charts")
    assert rows_of(text)["rows"] == len(records)


def test_a_torn_line_is_counted_and_named(tmp_path: Path) -> None:
    _, page, _ = build(tmp_path, synthetic.grid((512,), (0.5,)), tail='{"case": {"op')
    assert "records.jsonl, line 13: torn or not JSON" in page.words("failures")


def test_cpu_results_are_labelled(tmp_path: Path) -> None:
    records = [replace(record, env={"gpu": None, "cpu": "X"}) for record in synthetic.grid((512,), (0.5,))]
    _, page, _ = build(tmp_path, records, run=synthetic.manifest(12, device="cpu", scale="cpu"), ceilings=None)
    assert page.words("summary").startswith(figures.CPU_NOTE)


def test_absolute_paths_do_not_get_into_a_page(whole: tuple[Results, Page, str]) -> None:
    results, _, text = whole
    assert str(results.target.root.parent) not in text


def hostile(records: list[Record]) -> list[Record]:
    """Records whose every text is an attack."""
    return [
        replace(
            record,
            case=replace(record.case, provider=f"{record.case.provider}{ATTACK if i % 2 else ''}"),
            status="failed" if i % 3 == 0 else record.status,
            reason=ATTACK,
            env={**synthetic.ENV, "cpu": ATTACK, "driver": f"{i % 2}{ATTACK}"},
            inputs={"label": f"{record.inputs['label']}{ATTACK}"},
        )
        for i, record in enumerate(records)
    ]


def test_text_of_records_is_inert(tmp_path: Path) -> None:
    run = synthetic.manifest(9, description=ATTACK, config=ATTACK, command=ATTACK, providers={"fa4": ATTACK})
    _, page, text = build(tmp_path, hostile(synthetic.grid((512, 1024), (0.5,))), run=run)
    assert not [tag for tag, _ in page.tags if tag == "img"]
    assert sum(tag == "script" for tag, _ in page.tags) == 2
    assert "{{ 7*7 }}" in page.words("failures")
    assert any(ATTACK in word for column in rows_of(text)["columns"] for word in column.get("words", ()))


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, float]:
    """A report on 10,080 records, and the seconds of processor time that it took."""
    records = synthetic.grid(seeds=range(1, 57))
    folder = synthetic.write_folder(tmp_path_factory.mktemp("many"), records, run=synthetic.manifest(len(records)))
    begin = time.process_time()
    return html.build(folder), time.process_time() - begin


def test_ten_thousand_records_in_seconds(many: tuple[Results, float]) -> None:
    results, seconds = many
    assert seconds < 30  # 8 on an idle core
    assert results.target.report.stat().st_size < 5e6
    assert len(pd.read_csv(results.target.table)) == 10_080


def test_reports_import_neither_torch_nor_operators() -> None:
    code = (
        "import sys, jfabench.reports.html, jfabench.reports.terminal\n"
        "bad = [m for m in sys.modules if m.split('.')[0] in ('torch', 'triton')"
        " or m.startswith(('jfabench.operators', 'jfabench.kernels', 'jfabench.operator'))\n"
        " or m.endswith('pyplot')]\n"
        "sys.exit(repr(bad) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# In the browser ------------------------------------------------------------------------------------------------------


A4 = {"width": 794, "height": 1123, "deviceScaleFactor": 1, "mobile": False}


def open_page(browser: Any, results: Results, width: int = 1280, *, dark: bool = False) -> None:
    show_page(browser, results.target.report, width, dark=dark)


def cells(browser: Any, column: str) -> list[str]:
    """The texts of one column of the shown page of the results table."""
    texts: list[str] = browser.execute_script(
        """const at = [...document.querySelectorAll('#results th')].findIndex(
             (cell) => cell.textContent === arguments[0]);
           return [...document.querySelectorAll('#results tbody tr')].map((row) => row.cells[at].textContent);""",
        column,
    )
    return texts


def press(browser: Any, column: str) -> Any:
    """Chooses a column's heading with the keyboard alone; returns the heading."""
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    heading = browser.find_element(By.XPATH, f"//table[@id='results']//th[.='{column}']")
    heading.find_element(By.TAG_NAME, "button").send_keys(Keys.ENTER)
    return heading


def choose(browser: Any, column: str, value: str) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import Select

    Select(browser.find_element(By.CSS_SELECTOR, f"select[data-column={column}]")).select_by_visible_text(value)


def search(browser: Any, text: str) -> None:
    from selenium.webdriver.common.by import By

    box = browser.find_element(By.ID, "search")
    box.clear()
    box.send_keys(text)


def position(browser: Any) -> str:
    return str(browser.execute_script("return document.getElementById('position').textContent"))


@pytest.mark.browser
@pytest.mark.parametrize("width", [360, 768, 1920])
@pytest.mark.parametrize("dark", [False, True])
def test_the_page_never_scrolls_sideways(
    browser: Any, whole: tuple[Results, Page, str], width: int, dark: bool
) -> None:
    open_page(browser, whole[0], width, dark=dark)
    script = "const root = document.documentElement; return [innerWidth, root.clientWidth, root.scrollWidth]"
    inner, visible, content = browser.execute_script(script)
    assert inner == width
    assert content == visible


@pytest.mark.browser
def test_nothing_is_requested_and_nothing_is_logged(browser: Any, whole: tuple[Results, Page, str]) -> None:
    open_page(browser, whole[0])
    press(browser, "TFLOP/s")
    search(browser, "fa4")
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
    assert {url for url in urls if not url.startswith("data:")} == {whole[0].target.report.resolve().as_uri()}
    assert browser.get_log("browser") == []


@pytest.mark.browser
def test_sorting_by_keyboard_up_down_and_back(browser: Any, whole: tuple[Results, Page, str]) -> None:
    results, _, _ = whole
    open_page(browser, results)
    speed = results.rows["tflops"]

    def shown() -> list[float]:
        return [float(text.replace(",", "")) for text in cells(browser, "TFLOP/s")]

    assert press(browser, "TFLOP/s").get_attribute("aria-sort") == "ascending"
    assert shown() == pytest.approx(speed.dropna().sort_values().head(50).tolist(), rel=1e-3)
    assert press(browser, "TFLOP/s").get_attribute("aria-sort") == "descending"
    assert shown() == pytest.approx(speed.dropna().sort_values(ascending=False).head(50).tolist(), rel=1e-3)
    assert press(browser, "TFLOP/s").get_attribute("aria-sort") is None
    assert cells(browser, "provider") == results.rows["provider"].head(50).tolist()
    press(browser, "provider")
    press(browser, "provider")
    assert cells(browser, "provider") == ["triton_jfa"] * 30 + ["torch_varlen"] * 20
    assert browser.execute_script("return document.querySelectorAll('[aria-sort]').length") == 1


@pytest.mark.browser
def test_rows_without_a_number_come_last_in_both_orders(browser: Any, whole: tuple[Results, Page, str]) -> None:
    open_page(browser, whole[0])
    choose(browser, "provider", "sdpa_padded")
    for _ in range(2):
        press(browser, "speedup")
        assert cells(browser, "speedup")[-6:] == ["–"] * 6


@pytest.mark.browser
def test_filters_combine_and_reset(browser: Any, whole: tuple[Results, Page, str]) -> None:
    from selenium.webdriver.common.by import By

    results, _, _ = whole
    open_page(browser, results)
    assert position(browser) == "Rows 1 to 50 of 180"
    choose(browser, "status", "oom")
    assert position(browser) == "Rows 1 to 6 of 6 (filtered from 180)"
    assert set(cells(browser, "provider")) == {"sdpa_padded"}
    choose(browser, "direction", "bwd")
    assert position(browser).startswith("Rows 1 to 3 of 3")
    search(browser, "CUDA out fill=0.9")
    assert position(browser).startswith("Rows 1 to 1 of 1")
    search(browser, "no such word")
    assert position(browser) == "No row matches (of 180)"
    browser.find_element(By.ID, "reset").click()
    assert position(browser) == "Rows 1 to 50 of 180"


@pytest.mark.browser
def test_paging_shows_every_row_once(browser: Any, whole: tuple[Results, Page, str]) -> None:
    from selenium.webdriver.common.by import By

    results, _, _ = whole
    open_page(browser, results)
    seen = cells(browser, "median")
    assert not browser.find_element(By.ID, "previous").is_enabled()
    while (button := browser.find_element(By.ID, "next")).is_enabled():
        button.click()
        seen += cells(browser, "median")
    assert position(browser) == "Rows 151 to 180 of 180"
    assert len(seen) == 180
    assert seen.count("–") == int(results.rows["median_s"].isna().sum())
    first = results.rows["median_s"].iloc[0]
    assert seen[0] == f"{first * 1e3:.3f} ms"


@pytest.mark.browser
def test_dark_mode_changes_page_and_charts(browser: Any, whole: tuple[Results, Page, str]) -> None:
    script = """const style = (element) => getComputedStyle(element);
        const text = [...document.querySelectorAll('.panels text')].find((e) => e.textContent === 'fa4_kernel');
        return [style(document.body).backgroundColor, style(document.body).color, style(text).fill]"""
    open_page(browser, whole[0])
    assert browser.execute_script(script) == ["rgb(255, 255, 255)", "rgb(27, 31, 36)", "rgb(184, 67, 0)"]
    open_page(browser, whole[0], dark=True)
    assert browser.execute_script(script) == ["rgb(22, 26, 31)", "rgb(232, 235, 239)", "rgb(255, 155, 94)"]


@pytest.mark.browser
def test_every_panel_is_seen_at_a_readable_size(browser: Any, whole: tuple[Results, Page, str]) -> None:
    open_page(browser, whole[0], 360)
    heights = browser.execute_script(
        "return [...document.querySelectorAll('.panels text')].map((e) => e.getBoundingClientRect().height)"
    )
    assert len(heights) > 18 * 10
    assert min(heights) >= 9
    sizes = browser.execute_script(
        "return [...document.querySelectorAll('.panels svg')].map((e) => e.getBoundingClientRect().width)"
    )
    assert len(sizes) == 18
    assert min(sizes) >= 300


@pytest.mark.browser
def test_hostile_text_runs_nothing(browser: Any, tmp_path: Path) -> None:
    results, _, _ = build(tmp_path, hostile(synthetic.grid((512, 1024), (0.5,))))
    open_page(browser, results)
    press(browser, "reason")
    assert browser.title == "jagged – jfabench"
    assert browser.execute_script("return document.images.length") == 0
    assert set(cells(browser, "reason")) == {ATTACK}
    assert browser.get_log("browser") == []


@pytest.mark.browser
def test_ten_thousand_rows_are_sorted_and_filtered_at_once(browser: Any, many: tuple[Results, float]) -> None:
    open_page(browser, many[0])
    begin = time.monotonic()
    press(browser, "TFLOP/s")
    search(browser, "fa4_kernel")
    assert time.monotonic() - begin < 10
    assert position(browser) == "Rows 1 to 50 of 1,680 (filtered from 10,080)"


@pytest.mark.browser
def test_printing_opens_what_is_folded_and_shows_all_rows(browser: Any, whole: tuple[Results, Page, str]) -> None:
    open_page(browser, whole[0])
    shown = """const count = (selector) => document.querySelectorAll(selector).length;
        return [count('#results tbody tr'), count('details:not([open])')]"""
    before = browser.execute_script(shown)
    assert before[0] == 50
    assert before[1] > 0
    browser.execute_script("dispatchEvent(new Event('beforeprint'))")
    # A4 at 96 dots per inch: nothing is cut off at the right.
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", A4)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    assert browser.execute_script("return document.documentElement.scrollWidth") <= A4["width"]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    assert browser.execute_script(shown) == [180, 0]
    browser.execute_script("dispatchEvent(new Event('afterprint'))")
    assert browser.execute_script(shown) == before


def test_merged_folders_go_where_they_are_told(tmp_path: Path) -> None:
    records = synthetic.grid((512, 1024), (0.5,))
    folders = [synthetic.write_folder(tmp_path / str(i), records[i::2], run=synthetic.manifest(12)) for i in (0, 1)]
    results = html.build(folders, ResultFolder(tmp_path / "both"))
    assert (tmp_path / "both" / "report.html").exists()
    assert not (tmp_path / "0" / "report.html").exists()
    assert len(results.rows) == 24
