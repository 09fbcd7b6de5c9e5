"""The workflow files of GitHub are valid, and what they run exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def load(path: Path) -> dict[Any, Any]:
    data = yaml.safe_load(path.read_text())
    assert isinstance(data, dict)
    return data


def check(*paths: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows"]
    return subprocess.run([*command, *map(str, paths)], capture_output=True, text=True, check=False, timeout=60)


def test_there_are_two() -> None:
    assert [path.name for path in WORKFLOWS] == ["ci.yml", "nightly.yml"]


def test_they_follow_the_schema() -> None:
    done = check(*WORKFLOWS)
    assert done.returncode == 0, done.stdout


def test_a_mistake_does_not_follow_the_schema(tmp_path: Path) -> None:
    text = WORKFLOWS[1].read_text()
    assert text.count("timeout-minutes: 90") == 1
    (tmp_path / "wrong.yml").write_text(text.replace("timeout-minutes: 90", "time-out: 90"))
    assert check(tmp_path / "wrong.yml").returncode == 1


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_scripts_exist_and_expressions_are_whole(path: Path) -> None:
    text = path.read_text()
    scripts = re.findall(r"(?<![\w./])((?:scripts|\.ci)/[\w.]+)", text)
    assert scripts
    for name in scripts:
        assert (ROOT / name).is_file(), name
    assert text.count("${{") == text.count("}}")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_what_they_refer_to_is_defined(path: Path) -> None:
    """Steps and jobs by their id, and inputs by their name; no value of another's choice inside a shell script."""
    data = load(path)
    jobs = data["jobs"]
    dispatch = data[True].get("workflow_dispatch") or {}  # YAML reads `on` as a truth value
    inputs = dispatch.get("inputs", {})
    for name in re.findall(r"inputs\.(\w+)", path.read_text()):
        assert name in inputs, name
    for job in jobs.values():
        needs = job.get("needs", [])
        assert set([needs] if isinstance(needs, str) else needs) <= set(jobs)
        ids = {step["id"] for step in job["steps"] if "id" in step}
        for name in re.findall(r"steps\.(\w+)\.", yaml.safe_dump(job)):
            assert name in ids, name
        for step in job["steps"]:
            assert not re.search(r"\$\{\{\s*(inputs|github\.(event|head_ref))", step.get("run", "")), step["run"]


def test_both_gpus_have_a_runner_and_nobody_elses_code_runs_there() -> None:
    data = load(ROOT / ".github" / "workflows" / "nightly.yml")
    assert set(data[True]) == {"schedule", "workflow_dispatch"}
    measure = data["jobs"]["measure"]
    assert measure["runs-on"] == ["self-hosted", "linux", "gpu", "${{ matrix.gpu }}"]
    assert {"b200", "h200"} <= set(re.findall(r"\w+", measure["strategy"]["matrix"]["gpu"]))
