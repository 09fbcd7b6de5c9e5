"""The nightly run. Its own commands are replaced by what they would leave behind; one test runs them all, on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import fake_tree
import nights
import pytest

from jfabench import nightly, nightly_report
from jfabench.cli import main
from jfabench.folder import ResultFolder
from jfabench.history import History, opened
from jfabench.nightly import GOOD, INFRASTRUCTURE, REGRESSION, WRONG, Night, Options
from jfabench.records import Case, Record
from jfabench.reports import trends
from jfabench.sweep import Sweep, load_sweep

SEVERAL = ("reference", "sdpa_padded")


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("JFABENCH_TUNE", "0")
    for name in ("GITHUB_STEP_SUMMARY", "GITHUB_REPOSITORY", "JFABENCH_HISTORY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def sweep() -> Sweep:
    return load_sweep("nightly.yaml", "cpu")


ENV = {**nights.ENV, "gpu": None, "cpu": "a CPU", "cpu_cores": 2}


def records(sweep: Sweep, number: int, commit: str, seconds: dict[str, float] | None = None) -> list[Record]:
    """A whole night of the grid; `seconds` by provider, 1 ms otherwise."""
    made = []
    for case in sweep.cases:
        plain = nights.record(nights.case(1), (seconds or {}).get(case.provider, 1e-3), nights.night(number))
        made.append(replace(plain, case=case, env={**ENV, "commit": commit}, inputs={"label": "made up"}))
    return made


Do = Callable[..., Night]


@pytest.fixture
def do(tmp_path: Path, sweep: Sweep) -> Do:
    """Runs a night whose commands leave `left` (records, or an exit code and what it says), in a repository `tree`."""

    def run(name: str, left: Sequence[Record] | tuple[int, str], tree: Path | None = None, **changes: Any) -> Night:
        out = tmp_path / name

        real = subprocess.run

        def command(arguments: Sequence[str], **options: Any) -> subprocess.CompletedProcess[Any]:
            if arguments[1:3] != ["-m", "jfabench"]:
                return real(arguments, **options)  # git
            if arguments[3] == "sweep":
                if isinstance(left, tuple):
                    (out / "sweep.log").write_text(left[1])
                    return subprocess.CompletedProcess(arguments, left[0])
                nights.write(out / "run", left)
            return subprocess.CompletedProcess(arguments, 0)

        options = Options(
            sweep, "cpu", out, f"sqlite:///{tmp_path}/history.sqlite", SEVERAL, tree=str(tree or tmp_path), pairs=4
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nightly.subprocess, "run", command)
            return nightly.run(replace(options, **changes), lambda text: None)

    return run


def verdicts(tmp_path: Path) -> list[str]:
    history = History(f"sqlite:///{tmp_path}/history.sqlite")
    found = [run.verdict for run in history.runs()]
    history.close()
    return found


def repository(root: Path, *speeds: dict[str, float], status: Sequence[dict[str, str]] = ()) -> tuple[Path, list[str]]:
    """A repository of a fake tree with one commit for each of `speeds` (and `status`); the folder and the hashes."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), "-c", "user.name=n", "-c", "user.email=e", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    commits = []
    for number, speed in enumerate(speeds):
        outcome = status[number] if status else None
        fake_tree.make(root.parent / f"sources-{number}", speed, status=outcome, turns=root.parent / "turns.jsonl")
        root.mkdir(exist_ok=True)
        subprocess.run(["cp", "-r", f"{root.parent}/sources-{number}/.", str(root)], check=True)
        if not number:
            git("init", "-q")
        git("add", "-A")
        git("commit", "-qm", "x", "--allow-empty")
        commits.append(git("rev-parse", "HEAD"))
    return root, commits


# Outcomes ------------------------------------------------------------------------------------------------------------


def test_the_first_night_is_what_others_are_compared_with(do: Do, sweep: Sweep, tmp_path: Path) -> None:
    night = do("one", records(sweep, 1, "1" * 40))
    assert night.code == GOOD
    assert night.last is None
    assert verdicts(tmp_path) == ["good"]
    again = do("two", records(sweep, 2, "2" * 40))
    assert again.code == GOOD
    assert again.last is not None
    assert again.last.id == night.run
    assert [step.name for step in again.steps] == ["ceilings", "sweep", "history", "comparison"]  # nothing to repeat


def test_a_slower_commit_is_a_regression_once_both_were_measured_side_by_side(
    do: Do, sweep: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, (old, new) = repository(tmp_path / "repository", {}, {"sdpa_padded": 1.05e-3})
    monkeypatch.chdir(tree)
    do("one", records(sweep, 1, old))
    night = do("two", records(sweep, 2, new, {"sdpa_padded": 1.05e-3, "reference": 1.04e-3}), tree)
    assert night.code == REGRESSION
    # The reference was as slow that night, but not beside the old commit: not the code.
    assert {case.case.provider for case in night.regressions} == {"sdpa_padded"}
    assert len(night.regressions) == 4
    assert verdicts(tmp_path) == ["good", "regression"]
    assert night.repeated is not None
    assert len(night.repeated.cases) == 8
    third = do("three", records(sweep, 3, new), tree)
    assert third.last is not None
    assert third.last.commit == old  # a night with a regression is no reference


def test_a_slow_night_of_the_same_code_is_good(
    do: Do, sweep: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, (old, new) = repository(tmp_path / "repository", {}, {})
    monkeypatch.chdir(tree)
    do("one", records(sweep, 1, old))
    night = do("two", records(sweep, 2, new, dict.fromkeys(SEVERAL, 1.1e-3)), tree)
    assert night.code == GOOD
    assert "0 of 8 suspicious cases" in night.steps[-1].text


@pytest.mark.parametrize(("now", "expected"), [(1.05e-3, REGRESSION), (1e-3, GOOD)])
def test_without_the_old_commit_every_fresh_process_must_be_slower(
    do: Do, sweep: Sweep, tmp_path: Path, now: float, expected: int
) -> None:
    tree = fake_tree.make(tmp_path / "tree", {"sdpa_padded": now})
    do("one", records(sweep, 1, "1" * 40))  # nobody has this commit
    night = do("two", records(sweep, 2, "2" * 40, {"sdpa_padded": 1.05e-3}), tree)
    assert night.code == expected
    assert "without the old commit" in night.steps[-1].text


@pytest.mark.parametrize(("now", "expected"), [(1.05e-3, REGRESSION), (1e-3, GOOD)])
def test_an_old_commit_that_cannot_be_measured_any_more_hides_no_regression(
    do: Do, sweep: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, now: float, expected: int
) -> None:
    tree, (old, new) = repository(
        tmp_path / "repository", {}, {"sdpa_padded": now}, status=({"sdpa_padded": "failed"}, {})
    )
    monkeypatch.chdir(tree)
    do("one", records(sweep, 1, old))
    night = do("two", records(sweep, 2, new, {"sdpa_padded": 1.05e-3}), tree)
    assert night.code == expected
    assert len(night.regressions) == (4 if expected else 0)
    assert "without the old commit (it has no right result in 4 cases now)" in night.steps[-1].text


def test_what_fails_in_the_repetition_is_wrong(
    do: Do, sweep: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, (old, new) = repository(tmp_path / "repository", {}, {}, status=({}, {"sdpa_padded": "timeout"}))
    monkeypatch.chdir(tree)
    do("one", records(sweep, 1, old))
    night = do("two", records(sweep, 2, new, {"sdpa_padded": 1.05e-3}), tree)
    assert night.code == WRONG
    assert {record.case.provider for record in night.wrong} == {"sdpa_padded"}
    assert "4 not right every time" in night.steps[-1].text
    assert verdicts(tmp_path) == ["good", "wrong"]


def test_a_new_grid_starts_anew(do: Do, sweep: Sweep, tmp_path: Path) -> None:
    old = [replace(r, case=replace(r.case, seed=r.case.seed + 1)) for r in records(sweep, 1, "1" * 40)]
    nights.write(tmp_path / "old", old)
    with opened(f"sqlite:///{tmp_path}/history.sqlite") as history:
        history.add(ResultFolder(tmp_path / "old"), "good")
    night = do("one", records(sweep, 2, "2" * 40))
    assert night.code == GOOD
    assert "measured none of these cases" in night.steps[-1].text
    assert verdicts(tmp_path) == ["good", "good"]


def test_a_night_does_not_go_on_with_what_another_commit_began(do: Do, sweep: Sweep, tmp_path: Path) -> None:
    nights.write(tmp_path / "one" / "run", records(sweep, 1, "1" * 40)[:3])
    night = do("one", records(sweep, 1, "1" * 40))
    assert night.code == INFRASTRUCTURE
    assert "was begun at commit 111111111111" in night.failure
    assert "choose another --out" in night.failure


def test_a_fault_of_ours_does_not_look_like_a_regression(
    do: Do, sweep: Sweep, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(nightly, "_import", lambda night: {}["missing"])
    night = do("one", records(sweep, 1, "1" * 40))
    assert night.code == INFRASTRUCTURE
    assert night.failure == "history: KeyError: 'missing'"
    assert "Traceback" in capsys.readouterr().err


def test_commands_of_a_killed_night_die_with_it(tmp_path: Path) -> None:
    """`kill -9` in the middle of the sweep leaves nobody who holds the folder or the GPU."""
    program = f"""
import sys
from pathlib import Path
from jfabench import nightly
night = nightly.Night(nightly.Options(None, "cpu", Path({str(tmp_path)!r}), None, ()))
sys.executable = "/bin/sh"
nightly._command(night, "-c")
"""
    shell = tmp_path / "sh"
    shell.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 60\n")
    shell.chmod(0o755)
    process = subprocess.Popen([sys.executable, "-c", program.replace("/bin/sh", str(shell))])
    deadline = time.monotonic() + 60
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().endswith("\n"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    child = int((tmp_path / "pid").read_text())
    process.kill()
    process.wait()
    while Path(f"/proc/{child}").exists() and "Z" not in Path(f"/proc/{child}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_wrong_results_come_before_everything(do: Do, sweep: Sweep, tmp_path: Path) -> None:
    left = records(sweep, 1, "1" * 40)
    left[0] = replace(left[0], status="wrong", reason="out: max |error| 0.1 exceeds 0.01", measurement=None)
    left[1] = replace(left[1], status="timeout", reason="nothing was heard", measurement=None)
    night = do("one", left)
    assert night.code == WRONG
    assert [record.status for record in night.wrong] == ["wrong", "timeout"]
    assert verdicts(tmp_path) == ["wrong"]


def test_only_gated_providers_fail_a_night(do: Do, sweep: Sweep) -> None:
    left = records(sweep, 1, "1" * 40)
    left[0] = replace(left[0], status="wrong", measurement=None)
    assert left[0].case.provider == "reference"
    assert do("one", left, gate=("sdpa_padded",)).code == GOOD


@pytest.mark.parametrize(
    ("left", "words"),
    [
        ((3, "jfabench: no NVIDIA GPU found\n"), "no NVIDIA GPU found (exit code 3"),
        ((-9, ""), "no output (exit code -9"),
        ((0, ""), "no case gave a right result"),
    ],
)
def test_a_sweep_that_cannot_run_says_nothing_about_the_code(do: Do, left: tuple[int, str], words: str) -> None:
    night = do("one", left)
    assert night.code == INFRASTRUCTURE
    assert words in night.failure


def test_a_grid_without_any_right_result_is_no_fault_of_the_code(do: Do, sweep: Sweep, tmp_path: Path) -> None:
    left = [replace(r, status="unavailable", measurement=None, reason="x") for r in records(sweep, 1, "1" * 40)]
    night = do("one", left)
    assert night.code == INFRASTRUCTURE


def test_an_unfinished_sweep_is_not_judged(do: Do, sweep: Sweep) -> None:
    night = do("one", records(sweep, 1, "1" * 40)[:-1])
    assert night.code == INFRASTRUCTURE
    assert "7 of 8 cases have a record" in night.failure


def test_a_library_that_went_missing_is_infrastructure(do: Do, sweep: Sweep, tmp_path: Path) -> None:
    do("one", records(sweep, 1, "1" * 40))
    gone = [
        replace(r, status="unavailable", measurement=None) if r.case.provider == "sdpa_padded" else r
        for r in records(sweep, 2, "2" * 40)
    ]
    night = do("two", gone)
    assert night.code == INFRASTRUCTURE
    assert "sdpa_padded could run in the last good night" in night.failure
    assert verdicts(tmp_path) == ["good", "unknown"]


def test_a_database_that_cannot_be_used_is_infrastructure(do: Do, sweep: Sweep) -> None:
    night = do("one", records(sweep, 1, "1" * 40), database="mysql://host/x")
    assert night.code == INFRASTRUCTURE
    assert "SQLite and PostgreSQL" in night.failure


def test_another_machine_starts_its_own_history(do: Do, sweep: Sweep) -> None:
    do("one", records(sweep, 1, "1" * 40))
    other = [replace(r, env={**r.env, "torch": "2.13.0"}) for r in records(sweep, 2, "2" * 40, {"reference": 1.0})]
    night = do("two", other)
    assert night.code == GOOD
    assert night.last is None


# What is written -----------------------------------------------------------------------------------------------------


@pytest.fixture
def bad_night(do: Do, sweep: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Night:
    tree, (old, new) = repository(tmp_path / "repository", {}, {"sdpa_padded": 1.05e-3})
    monkeypatch.chdir(tree)
    do("one", records(sweep, 1, old))
    left = records(sweep, 2, new, {"sdpa_padded": 1.05e-3})
    left[0] = replace(left[0], status="wrong", reason="a | b \x1b[31m\x00<&>", measurement=None)
    return do("two", left, tree)


def test_junit_names_what_failed_and_why(bad_night: Night) -> None:
    root = ElementTree.fromstring(nightly_report.junit(bad_night))
    failures = [(case.get("classname"), child.get("type")) for case in root.iter("testcase") for child in case]
    assert sorted(failures) == [
        ("jagged_attention.reference.fwd", "wrong"),
        *[("jagged_attention.sdpa_padded.bwd", "regression")] * 2,
        *[("jagged_attention.sdpa_padded.fwd", "regression")] * 2,
    ]
    assert (root.get("tests"), root.get("failures"), root.get("errors")) == ("13", "5", "0")
    message = next(c.find("failure") for c in root.iter("testcase") if c.find("failure") is not None)
    assert message is not None
    assert message.get("message") == "a | b ?[31m?<&>"


def test_junit_has_an_error_for_a_machine_that_failed(do: Do) -> None:
    root = ElementTree.fromstring(nightly_report.junit(do("one", (3, "no GPU"))))
    assert (root.get("tests"), root.get("failures"), root.get("errors")) == ("2", "0", "1")


def test_the_summary_says_it_first(bad_night: Night) -> None:
    text = nightly_report.markdown(bad_night)
    assert text.startswith("## ❌ Nightly: Wrong results\n")
    assert "| `reference` fwd made up | wrong | a \\| b" in text
    assert "measured again: A " in text
    assert text.count("**slower**") == 4
    for title, code in ((nightly_report.TITLES[c], c) for c in (GOOD, REGRESSION, WRONG, INFRASTRUCTURE)):
        assert title in nightly_report.TITLES[code]


def test_everything_is_written_and_shown_on_github(bad_night: Night, tmp_path: Path) -> None:
    shown = tmp_path / "step.md"
    shown.write_text("before\n")
    files = nightly_report.write(bad_night, environment={"GITHUB_STEP_SUMMARY": str(shown)})
    assert sorted(path.name for path in files) == [
        "comparison.csv", "comparison.html", "junit.xml", "summary.md", "trends.html"
    ]  # fmt: skip
    assert shown.read_text() == "before\n" + (bad_night.options.out / "summary.md").read_text()


def test_links_come_from_github_or_from_the_remote(tmp_path: Path) -> None:
    assert nightly_report.links_of_repository({"GITHUB_REPOSITORY": "o/n"}) == trends.github("https://github.com/o/n")
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    assert nightly_report.links_of_repository({}, str(tmp_path)) == trends.Links()
    remote = ["git", "-C", str(tmp_path), "remote"]
    subprocess.run([*remote, "add", "origin", "git@github.com:o/n.git"], check=True)
    assert nightly_report.links_of_repository({}, str(tmp_path)) == trends.github("https://github.com/o/n")
    subprocess.run([*remote, "set-url", "origin", "https://elsewhere.example/o/n"], check=True)
    assert nightly_report.links_of_repository({}, str(tmp_path)) == trends.Links()


# The command ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--config", "nowhere.yaml"], "no sweep file"),
        (["--config", "nightly.yaml", "--gate", "fa3"], "--gate fa3: not in this grid"),
    ],
)
def test_mistakes_are_explained(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nightly", *arguments, "--device", "cpu"]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("address", "code"), [("bad://x", 2), ("no url", 2), ("sqlite://", 2), ("sqlite:///{}/file/history.sqlite", 3)]
)
def test_a_database_that_cannot_be_used_is_known_before_anything_is_measured(
    address: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(*_: object) -> Night:
        raise AssertionError("it was measured")

    monkeypatch.setattr(nightly, "run", measured)
    (tmp_path / "file").touch()
    out = tmp_path / "night"
    command = ["nightly", "--config", "nightly.yaml", "--device", "cpu", "--out", str(out)]
    assert main([*command, "--db", address.format(tmp_path)]) == code
    assert address.format(tmp_path) in capsys.readouterr().err
    assert not out.exists()


def test_a_whole_night_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grid = ["--config", "nightly.yaml", "--device", "cpu", "--set", "lengths=[{kind: constant, length: 32}]"]
    fast = ["--set", "measure.max_seconds=0.05", "--set", "measure.warmup_seconds=0.02", "--set", "directions=[fwd]"]
    database = f"sqlite:///{tmp_path}/history.sqlite"
    out = tmp_path / "night"
    code = main(["nightly", *grid, *fast, "--no-ceilings", "--db", database, "--out", str(out)])
    shown = capsys.readouterr().out
    assert code == GOOD, shown
    assert "sweep: done (2 of 2 cases right)" in shown
    for name in ("run/report.html", "summary.md", "junit.xml", "trends.html"):
        assert (out / name).stat().st_size > 100
    assert verdicts(tmp_path) == ["good"]
    assert main(["nightly", *grid, "--db", database, "--out", str(out)]) == 2
    assert "holds a night that has come to its end" in capsys.readouterr().err
    assert main(["history", "runs", "--db", database]) == 0
    assert "good" in capsys.readouterr().out
    assert main(["history", "import", str(out / "run"), "--db", database]) == 0
    assert "known already, 0 results" in capsys.readouterr().out
    assert main(["history", "report", "--db", database, "--out", str(tmp_path / "pages")]) == 0
    assert (tmp_path / "pages" / "trends.html").exists()
    assert main(["history", "report", "--machine", "B200", "--db", database]) == 1


def test_cases_of_the_nightly_grid_come_from_both_grids() -> None:
    cases: list[Case] = list(load_sweep("nightly.yaml").cases)
    kinds = {(json.dumps(case.params["broadcast_q"]), case.params["lengths"]["kind"]) for case in cases}
    assert kinds == {("true", "fill"), ("false", "constant")}
    assert all(case.params.get("q_len") == {"fill": 256}.get(case.params["lengths"]["kind"]) for case in cases)
    assert len(cases) == 10 * 2 * 3
