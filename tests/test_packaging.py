"""What the wheel holds, and that an editable install and a wheel give the same packages."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata, resources
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS = {name: ROOT / name for name in ("jfabench", "kernels", "operators", "reports", "sweeps")}
CODE_AND_SWEEPS = (".py", ".yaml", ".typed")


def shipped(folder: Path) -> list[Path]:
    """The files of a package's folder that its users need: code, templates, sweep files; no results, no caches."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    inside = {path: path.relative_to(folder).parts for path in files}
    kept = [path for path in files if not {"__pycache__", "results"} & {*inside[path]}]
    return [path for path in kept if path.suffix in CODE_AND_SWEEPS or "templates" in inside[path]]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, built from a copy, so that no `build/` of an earlier run slips in or stays behind."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in (*FOLDERS, "tests", "scripts"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    results = source / "reports" / "results" / "a-device"
    results.mkdir(parents=True, exist_ok=True)
    (results / "report.html").write_text("large")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--wheel-dir", target, source], check=True, capture_output=True, text=True)
    (built,) = target.glob("*.whl")
    return zipfile.ZipFile(built)


def test_the_wheel_holds_every_file_that_is_needed(wheel: zipfile.ZipFile) -> None:
    expected = set()
    for name, folder in FOLDERS.items():
        package = name if name == "jfabench" else f"jfabench/{name}"
        expected |= {f"{package}/{path.relative_to(folder).as_posix()}" for path in shipped(folder)}
    assert {"jfabench/py.typed", "jfabench/cli.py", "jfabench/sweeps/jagged.yaml"} <= expected
    assert expected <= set(wheel.namelist())


def test_the_wheel_holds_nothing_else(wheel: zipfile.ZipFile) -> None:
    info = f"jfabench-{PYPROJECT['project']['version']}.dist-info/"
    strangers = [name for name in wheel.namelist() if not name.startswith(("jfabench/", info))]
    assert strangers == []
    assert [name for name in wheel.namelist() if "results" in name or "test_" in name] == []
    assert f"{info}licenses/LICENSE" in wheel.namelist()


def test_the_wheel_works_without_the_repository(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """Unpacked first on the path, it takes the place of the editable install."""
    wheel.extractall(tmp_path)
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import jfabench, jfabench.operators, jfabench.kernels, jfabench.reports, jfabench.sweeps, jfabench.cli\n"
        "modules = [m for n, m in sys.modules.items() if n.partition('.')[0] == 'jfabench']\n"
        "assert all(m.__file__.startswith(sys.argv[1]) for m in modules), modules\n"
        "sys.exit(jfabench.cli.main(['sweep', '--config', 'jagged.yaml', '--device', 'cpu', '--dry-run']))"
    )
    # -S leaves out the finder of the editable install; the packages of others stay reachable.
    done = subprocess.run(
        [sys.executable, "-S", "-c", program, tmp_path],
        env={"PYTHONPATH": str(Path(sys.modules["pytest"].__file__ or "").parent.parent), "COLUMNS": "200"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "cases" in done.stdout


def test_the_entry_point_is_the_command_line() -> None:
    (command,) = metadata.entry_points(group="console_scripts", name="jfabench")
    from jfabench.cli import main

    assert command.load() is main


def test_versions_agree() -> None:
    import jfabench

    assert jfabench.__version__ == PYPROJECT["project"]["version"]


def test_every_folder_with_code_is_a_declared_package() -> None:
    """A forgotten subpackage would work from the repository and be missing from the wheel."""
    declared = set(PYPROJECT["tool"]["setuptools"]["packages"])
    found = set()
    for name, folder in FOLDERS.items():
        for path in shipped(folder):
            if path.suffix == ".py":
                parents = path.parent.relative_to(folder).parts
                found.add(".".join(("jfabench", *(() if name == "jfabench" else (name,)), *parents)))
    assert found == declared


def test_sweep_files_are_resources() -> None:
    names = {path.name for path in resources.files("jfabench.sweeps").iterdir() if path.name.endswith(".yaml")}
    assert names == {path.name for path in (ROOT / "sweeps").glob("*.yaml")}


def test_uv_leaves_upstream_triton_out() -> None:
    """What keeps `uv sync` from installing two distributions into the folder `triton/`."""
    from pip._vendor.packaging.requirements import Requirement

    (override,) = (Requirement(text) for text in PYPROJECT["tool"]["uv"]["override-dependencies"])
    assert override.name == "triton"
    assert override.marker is not None
    assert not override.marker.evaluate()


def test_mypy_is_lenient_with_device_code_only() -> None:
    """The modules that pyproject.toml excuses from annotations are those with `@triton.jit`, no more and no fewer."""
    (lenient,) = (
        override["module"] for override in PYPROJECT["tool"]["mypy"]["overrides"] if "disallow_untyped_defs" in override
    )
    with_device_code = [
        "jfabench." + ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in sorted((ROOT / "kernels").rglob("*.py"))
        if any(line.strip().startswith("@triton.jit") for line in path.read_text().splitlines())
    ]
    assert lenient == with_device_code
