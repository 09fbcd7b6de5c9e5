"""What people and CI read of a night: a Markdown summary, JUnit XML, and the pages of comparison and history."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

from jfabench.folder import write_whole
from jfabench.history import HistoryError, opened
from jfabench.intervals import median_interval
from jfabench.nightly import GOOD, INFRASTRUCTURE, REGRESSION, WRONG, Night
from jfabench.records import NEUTRAL_STATUSES, Record
from jfabench.regression import CaseResult
from jfabench.reports import comparison, trends

TITLES = {
    GOOD: "Good: no regression, all results right",
    REGRESSION: "Regression",
    WRONG: "Wrong results",
    INFRASTRUCTURE: "Infrastructure failure: nothing is known about the code",
}
_MOST_WRONG = 20


def write(night: Night, links: trends.Links | None = None, environment: Mapping[str, str] = os.environ) -> list[Path]:
    """Writes everything into the night's folder, and the summary to where GitHub shows it. Returns the files."""
    out = night.options.out
    summary = markdown(night)
    if step_summary := environment.get("GITHUB_STEP_SUMMARY"):
        with Path(step_summary).open("a", encoding="utf-8") as file:
            file.write(summary)
    files = {out / "summary.md": summary.encode(), out / "junit.xml": junit(night)}
    for path, content in files.items():
        write_whole(path, content)
    written = list(files)
    found = night.repeated or night.against_last
    if found is not None:
        written += [comparison.write_table(found, out), comparison.write_page(found, out)]
    if night.machine:
        try:
            with opened(night.options.database, reading=True) as history:
                trends.write(history.series(night.machine), out / "trends.html", links)
            written.append(out / "trends.html")
        except HistoryError:
            pass  # the step that imports has said so
    return written


def is_finished(out: Path) -> bool:
    """Whether a night has come to a verdict in this folder."""
    summary = out / "summary.md"
    return summary.exists() and TITLES[INFRASTRUCTURE] not in summary.read_text(encoding="utf-8").partition("\n")[0]


def links_of_repository(environment: Mapping[str, str] = os.environ, tree: str = ".") -> trends.Links:
    """Links to commits: on GitHub Actions from its variables, elsewhere from the remote `origin` if that is GitHub."""
    if repository := environment.get("GITHUB_REPOSITORY"):
        return trends.github(f"{environment.get('GITHUB_SERVER_URL', 'https://github.com')}/{repository}")
    command = ["git", "-C", tree, "remote", "get-url", "origin"]
    try:
        url = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return trends.Links()
    if url.startswith("git@github.com:"):
        url = f"https://github.com/{url.removeprefix('git@github.com:')}"
    return trends.github(url) if url.startswith("https://github.com/") else trends.Links()


# Markdown ------------------------------------------------------------------------------------------------------------


def markdown(night: Night) -> str:
    """For a step summary or a comment: the outcome first, then what is wrong or slower, then the steps."""
    mark = "✅" if night.code == GOOD else "⚠️" if night.code == INFRASTRUCTURE else "❌"
    lines = [f"## {mark} Nightly: {TITLES[night.code]}", ""]
    facts = [night.machine, f"commit `{night.commit[:12]}`" if night.commit else "", night.options.sweep.name]
    lines += [" · ".join(fact for fact in facts if fact), ""]
    if night.failure:
        lines += [f"**{night.failure}**", ""]
    if night.options.device == "cpu":
        lines += ["Measured on a CPU: a test of the procedure, no performance result.", ""]
    if night.wrong:
        lines += ["### No right result", "", "| case | status | reason |", "|---|---|---|"]
        lines += [f"| {_name(r)} | {r.status} | {_cell(r.reason)} |" for r in night.wrong[:_MOST_WRONG]]
        lines += [f"\n... and {len(night.wrong) - _MOST_WRONG} more."] if len(night.wrong) > _MOST_WRONG else []
        lines.append("")
    if night.repeated is not None:
        a, b = night.repeated.labels
        lines += [f"### Suspicious cases, measured again: A {a}, B {b}", "", comparison.markdown(night.repeated)]
    if night.against_last is not None:
        a, b = night.against_last.labels
        lines += ["<details><summary>Against the last good night</summary>", ""]
        lines += [f"A: {a}; B: {b}. Times of two nights: what differs is repeated before it counts.", ""]
        lines += [comparison.markdown(night.against_last), "</details>", ""]
    lines += ["| step | | seconds | |", "|---|---|---:|---|"]
    lines += [f"| {s.name} | {s.state} | {s.seconds:.0f} | {_cell(s.text)} |" for s in night.steps]
    return "\n".join(lines) + "\n"


def _name(record: Record) -> str:
    return f"`{record.case.provider}` {record.case.direction} {record.inputs.get('label', '')}"


def _cell(text: str, most: int = 300) -> str:
    short = text if len(text) <= most else f"{text[:most]}..."
    return " ".join(short.replace("|", "\\|").split())


# JUnit ---------------------------------------------------------------------------------------------------------------


def junit(night: Night) -> bytes:
    """One test case for each step and each case of the grid; a regression and a wrong result are failures.

    Only what can fail the night fails here; the time of a test case is the median of the measured call in seconds.
    """
    root = ElementTree.Element("testsuites", name="jfabench nightly")
    steps = _suite(root, "steps")
    for step in night.steps:
        case = ElementTree.SubElement(
            steps, "testcase", classname="nightly.steps", name=step.name, time=f"{step.seconds:.3f}"
        )
        if step.state == "failed":
            ElementTree.SubElement(case, "error", type="infrastructure", message=_plain(step.text))
        elif step.state == "skipped":
            ElementTree.SubElement(case, "skipped", message=_plain(step.text))
    cases = _suite(root, night.options.sweep.name)
    slower = {result.case: result for result in night.regressions}
    wrong = {record.case for record in night.wrong}
    for record in night.records:
        middle = median_interval(record.measurement.rounds).middle if record.measurement else 0.0
        case = ElementTree.SubElement(
            cases,
            "testcase",
            classname=f"{record.case.operator}.{record.case.provider}.{record.case.direction}",
            name=str(record.inputs.get("label", "")) or record.case.key,
            time=f"{middle:.9f}",
        )
        if record.case in wrong:
            ElementTree.SubElement(case, "failure", type=record.status, message=_plain(record.reason))
        elif record.case in slower:
            ElementTree.SubElement(case, "failure", type="regression", message=_slower(slower[record.case]))
        elif record.status != "ok":
            why = record.status if record.status in NEUTRAL_STATUSES else f"{record.status}, not gated"
            ElementTree.SubElement(case, "skipped", message=_plain(f"{why}: {record.reason}"))
    for suite in (root, *root):
        own = list(suite.iter("testcase"))
        suite.set("tests", str(len(own)))
        for name, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
            suite.set(name, str(sum(case.find(tag) is not None for case in own)))
    ElementTree.indent(root)
    return bytes(ElementTree.tostring(root, encoding="utf-8", xml_declaration=True))


def _suite(root: ElementTree.Element, name: str) -> ElementTree.Element:
    return ElementTree.SubElement(root, "testsuite", name=name)


def _slower(result: CaseResult) -> str:
    shown = result.estimate.shown
    return (
        f"{comparison.change_text(shown.middle)} ({comparison.interval_text(shown)}) of time: "
        f"{comparison.time_text(result.seconds[0])} -> {comparison.time_text(result.seconds[1])}"
    )


def _plain(text: str) -> str:
    """Without what XML 1.0 cannot hold: control characters of a crashed compiler, say."""
    return "".join(c if c in "\t\n" or (ord(c) >= 0x20 and c not in "\ufffe\uffff") else "?" for c in text)
