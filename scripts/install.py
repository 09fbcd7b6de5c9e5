"""Installs jfabench, editable, into the environment of the Python that runs this (`setup.sh` makes one and calls this).

`pip install -e .` does the same but for three things:

- Without an NVIDIA GPU, pip may fetch a CUDA build of torch, several gigabytes for nothing. Here the CPU build is
  looked for first, and nothing large is downloaded before pip's plan, made from metadata alone, has been read.
- torch asks for upstream's triton and jfabench for fbtriton; both install the folder `triton/`, and the last one wins.
  Here upstream's is left out of the plan.
- Where everything is in place, nothing is resolved, built or fetched.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # jfabench may not be installed yet; what is used of it needs the standard library only

from jfabench import doctor  # noqa: E402

EXTRAS = ("dev", "parquet", "history", "fa3", "fa4")

TORCH = "torch==2.13.0"
"""The version whose own triton, 3.7.1, is nearest to the fbtriton that the kernels are written for."""

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
IMPATIENT = ("--retries", "0", "--timeout", "5")

PIP = "pip>=25.3"
"""The first pip whose dry run reads metadata only; older ones download every file to make their plan."""


class SetupError(Exception):
    """Why set-up stops, and what to do about it."""


@dataclass(frozen=True)
class Torch:
    """What to ask pip for: a requirement, options for pip, and the build that is wanted."""

    requirement: str
    options: tuple[str, ...] = ()
    build: str | None = None
    """`"cpu"`, `"cuda"`, or None for whatever the requirement and the options give."""


@dataclass(frozen=True)
class Package:
    name: str
    version: str

    @property
    def pin(self) -> str:
        return f"{self.name}=={self.version}"


# --- what this machine has -------------------------------------------------------------------------------------------


def has_gpu(dev: Path = Path("/dev")) -> bool:
    """Whether there is an NVIDIA GPU: its device file, or an nvidia-smi that lists one (WSL has no device file)."""
    if any(dev.glob("nvidia[0-9]*")):
        return True
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listing.returncode == 0 and "GPU " in listing.stdout


def compiler_problem() -> str | None:
    """Why triton could not build the small C launcher of each kernel, or None."""
    compiler = os.environ.get("CC")
    if not any(shutil.which(name) for name in ([compiler] if compiler else ["cc", "gcc", "clang"])):
        return "there is no C compiler (Debian, Ubuntu: apt install build-essential)"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        return f"there is no {header} (Debian, Ubuntu: apt install python3-dev)"
    return None


def choose_torch(asked: str | None, gpu: bool) -> Torch:
    """The torch to install, from `JFABENCH_TORCH` (see setup.sh) or else from what the machine has."""
    if asked in (None, "", "cpu", "cuda"):
        return Torch(TORCH, build=asked or ("cuda" if gpu else "cpu"))
    requirement, *options = shlex.split(asked)
    if not requirement.startswith("torch"):
        raise SetupError(f"JFABENCH_TORCH={asked!r} is neither cpu nor cuda nor a requirement such as torch==2.11.0.")
    return Torch(requirement, tuple(options))


# --- what jfabench needs ---------------------------------------------------------------------------------------------


def requirements(extras: Iterable[str], root: Path = ROOT) -> list[str]:
    """The build and run-time requirements of pyproject.toml with those of `extras`, without `jfabench[...]` itself."""
    pyproject = tomllib.loads((root / "pyproject.toml").read_text())
    name, optional = pyproject["project"]["name"], pyproject["project"]["optional-dependencies"]
    pending = [*pyproject["build-system"]["requires"], *pyproject["project"]["dependencies"]]
    pending += [requirement for extra in extras for requirement in optional[extra]]
    found: list[str] = []
    while pending:
        requirement = pending.pop(0)
        if requirement.startswith(f"{name}["):
            pending += [r for extra in requirement[len(name) + 1 : -1].split(",") for r in optional[extra.strip()]]
        elif requirement not in found:
            found.append(requirement)
    return found


def is_met(requirement: str) -> bool:
    """Whether an installed distribution satisfies `requirement`, or its marker excludes this machine."""
    from pip._vendor.packaging.requirements import Requirement

    wanted = Requirement(requirement)
    if wanted.marker is not None and not wanted.marker.evaluate():
        return True
    try:
        return wanted.specifier.contains(metadata.version(wanted.name), prereleases=True)
    except metadata.PackageNotFoundError:
        return False


def torch_is_met(torch: Torch, any_version: str) -> bool:
    """Whether torch is there: the version asked for, or, where only a build is asked for, any that jfabench can use.

    A CUDA build serves where there is no GPU, too; a CPU build where there is one does not.
    """
    if torch.build is None:
        return is_met(torch.requirement)
    return is_met(any_version) and not (torch.build == "cuda" and metadata.version("torch").endswith("+cpu"))


def stamp_path() -> Path:
    return Path(sys.prefix) / "jfabench-setup"


def stamp(root: Path = ROOT) -> str:
    """What the editable install was made from; where it differs from the stamp in the environment, it is made anew."""
    return f"{root}\n{hashlib.sha256((root / 'pyproject.toml').read_bytes()).hexdigest()}\n"


def is_stamped(root: Path = ROOT) -> bool:
    return is_met("jfabench") and stamp_path().is_file() and stamp_path().read_text() == stamp(root)


# --- pip -------------------------------------------------------------------------------------------------------------


def pip(*arguments: str, show: bool = False) -> None:
    """Runs pip; with `show`, a person at a terminal sees its progress. Raises `SetupError` if it fails."""
    command = [sys.executable, "-m", "pip", *arguments, "--disable-pip-version-check"]
    captured = not (show and sys.stdout.isatty())
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=captured, text=True, check=False)
    if done.returncode != 0:
        raise SetupError(f"this failed: {shlex.join(command)}\n{(done.stderr or '').strip()}".strip())


def plan(*arguments: str) -> list[Package]:
    """What `pip install ARGUMENTS` would install, from metadata alone. Raises `SetupError` if it finds no solution."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        pip("install", *arguments, "--dry-run", "--quiet", "--report", str(report))
        return read_report(json.loads(report.read_text()))


def read_report(report: dict[str, Any]) -> list[Package]:
    return [Package(item["metadata"]["name"], item["metadata"]["version"]) for item in report["install"]]


def cuda_packages(packages: Iterable[Package]) -> list[str]:
    """The names of NVIDIA's libraries among `packages`: a plan for torch that has any is one for a CUDA build."""
    return [package.name for package in packages if package.name.lower().startswith(("nvidia-", "cuda-"))]


def install(packages: Sequence[Package], *options: str) -> None:
    """Installs exactly `packages`, except upstream's triton, whose place fbtriton takes."""
    pins = [package.pin for package in packages if package.name.lower() != "triton"]
    if pins:
        print(f"set-up: installing {', '.join(pins)}", flush=True)
        pip("install", "--no-deps", *pins, *options, show=True)


# --- the steps -------------------------------------------------------------------------------------------------------


def install_torch(torch: Torch) -> None:
    if torch.build == "cpu":
        install_cpu_torch(torch)
    else:
        install(plan(torch.requirement, *torch.options), *torch.options)


def install_cpu_torch(torch: Torch) -> None:
    """The CPU build from PyTorch's index; where that cannot be reached, what pip finds, unless it is a CUDA build."""
    index: tuple[str, ...] = ("--index-url", CPU_INDEX)
    try:
        packages = plan(torch.requirement, "--no-deps", *index, *IMPATIENT)
    except SetupError:
        print(f"set-up: no {torch.requirement} from {CPU_INDEX}; looking where pip is configured to look", flush=True)
        packages, index = plan(torch.requirement), ()
        if cuda := cuda_packages(packages):
            raise SetupError(
                f"there is no NVIDIA GPU here, but the only torch that pip finds is a CUDA build of several gigabytes "
                f"(with {len(cuda)} packages such as {cuda[0]}). Make {CPU_INDEX} reachable, or put a CPU wheel of "
                f"torch into a folder and set PIP_FIND_LINKS=FOLDER, or allow the download with JFABENCH_TORCH=cuda."
            ) from None
    install(packages, *index)


def repair_triton() -> None:
    """Undoes an upstream triton that another run of pip brought in. One outside this environment may stay."""
    owners = doctor.triton_owners([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    if doctor.repair_commands(owners):
        try:
            print(f"set-up: {doctor.repair_triton(owners=owners)}", flush=True)
        except RuntimeError as problem:
            raise SetupError(str(problem)) from None


def set_up(extras: Sequence[str], asked_torch: str | None) -> None:
    gpu = has_gpu()
    torch = choose_torch(asked_torch, gpu)
    needed = requirements(extras)
    any_torch = next(requirement for requirement in needed if requirement.startswith("torch"))

    if problem := compiler_problem():
        if gpu:
            raise SetupError(f"triton needs a C compiler and Python's headers to launch kernels, and {problem}.")
        print(f"set-up: note: torch.compile will not work, since {problem}", file=sys.stderr)

    torch_missing = not torch_is_met(torch, any_torch)
    if torch_missing or not all(map(is_met, needed)):
        if not is_met(PIP):
            pip("install", "--upgrade", PIP)
        if torch_missing:
            if torch.build == "cuda" and is_met(any_torch):
                pip("uninstall", "--yes", "torch")  # to pip, 2.13.0+cpu is as good as 2.13.0
            install_torch(torch)
        if not all(map(is_met, needed)):
            # torch stays as it is, whatever the other packages would like.
            install(plan(f"torch=={metadata.version('torch')}", *needed))
    repair_triton()
    if not is_stamped():
        pip("install", "--no-deps", "--no-build-isolation", "--editable", str(ROOT))
        stamp_path().write_text(stamp())
    print(f"set-up: jfabench is ready in {sys.prefix} (torch {metadata.version('torch')})", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="setup.sh", description="Sets up jfabench; see the head of scripts/setup.sh.")
    for extra in EXTRAS:
        parser.add_argument(f"--{extra}", action="append_const", dest="extras", const=extra)
    extras = parser.parse_args(arguments).extras or []
    try:
        set_up(extras, os.environ.get("JFABENCH_TORCH"))
    except SetupError as problem:
        print(f"set-up: {problem}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
