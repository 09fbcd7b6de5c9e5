"""What this machine has and lacks, and the command that puts it right. Works with any part missing or broken.

torch and triton are imported in other processes only: a broken one is a finding, not a crash.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from jfabench import env
from jfabench.devices import gpu_names

Status = Literal["ok", "warn", "fail", "absent"]

FBTRITON = "3.7.4"
"""The fbtriton to install where none is."""

_PROBE_SECONDS = 120  # a cold import of torch from a network file system takes that long


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. `absent`: not there, and not needed for everything; `remedy` says what to do."""

    name: str
    status: Status
    detail: str
    remedy: str = ""


def examine() -> list[Finding]:
    """Looks at everything; never raises."""
    # The two slow imports run while the rest is looked at.
    torch, triton = _Probe(_TORCH_PROBE), _Probe(_TRITON_PROBE)
    gpus = gpu_names()
    has_gpu = bool(gpus)
    checks: dict[str, Callable[[], Finding]] = {
        "Python": lambda: Finding("Python", "ok", f"{platform.python_version()} at {sys.executable}"),
        "GPU": lambda: _gpu(gpus),
        "NVIDIA driver": lambda: _driver(env.driver_version()),
        "triton": lambda: triton_clash(triton_owners()),
        "FlashAttention-4": lambda: _package("FlashAttention-4", "flash-attn-4", "flash-attn-4>=4.0.0b36"),
        "FlashAttention-3": lambda: _package("FlashAttention-3", "fa3-fwd", "fa3-fwd"),
        "C compiler": _compiler,
        "Nsight Compute": _ncu,
        "GPU counters": lambda: counter_permission() if has_gpu else Finding("GPU counters", "absent", "no GPU"),
        "NVTX": lambda: _package("NVTX", "nvtx", "nvtx"),
        "disk": lambda: _disk(Path.cwd()),
        "torch": lambda: _torch(torch.answer(), has_gpu),
        "CUPTI": lambda: _cupti(torch.answer(), has_gpu),
        "TLX": lambda: _tlx(triton.answer()),
    }
    return [_careful(name, check) for name, check in checks.items()]


def _careful(name: str, check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except Exception as error:
        return Finding(name, "warn", f"this check itself failed: {type(error).__name__}: {error}", "please report it")


# Python, GPU, driver, torch -------------------------------------------------------------------------------------------


def _gpu(names: Sequence[str]) -> Finding:
    if not names:
        return Finding(
            "GPU", "absent", "no NVIDIA GPU", "sweeps run at the small CPU scale; measuring kernels needs a GPU"
        )
    return Finding("GPU", "ok", ", ".join(names))


def _driver(version: str | None) -> Finding:
    if version:
        return Finding("NVIDIA driver", "ok", version)
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return Finding("NVIDIA driver", "absent", "neither NVML nor nvidia-smi")
    said = _output([smi, "--query-gpu=driver_version", "--format=csv,noheader"])
    if said is None:
        return Finding("NVIDIA driver", "fail", "nvidia-smi fails", "run `nvidia-smi` to see why; reload the driver")
    return Finding(
        "NVIDIA driver",
        "warn",
        f"{said.splitlines()[0]}, but NVML cannot be used: records will lack clocks and throttling",
        "pip install nvidia-ml-py",
    )


_TORCH_PROBE = """
import json, torch
cuda = torch.cuda.is_available()
print(json.dumps({
    "version": torch.__version__, "cuda": torch.version.cuda, "available": cuda,
    "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [],
    "capability": list(torch.cuda.get_device_capability()) if cuda else None,
    "cupti": "CUDA" in {activity.name for activity in torch.profiler.supported_activities()},
}))
"""

_CUDA_TORCH = "install a CUDA build: see https://pytorch.org/get-started/locally"


def _torch(probe: dict[str, Any], has_gpu: bool) -> Finding:
    if "error" in probe:
        return Finding("torch", "fail", f"cannot be imported: {probe['error']}", f"reinstall it; {_CUDA_TORCH}")
    if probe["available"]:
        major, minor = probe["capability"]
        detail = f"{probe['version']}, CUDA {probe['cuda']}, sees {', '.join(probe['devices'])} (sm_{major}{minor})"
        return Finding("torch", "ok", detail)
    if not probe["cuda"]:
        detail = f"{probe['version']}, a build without CUDA"
        return Finding("torch", "fail", detail, _CUDA_TORCH) if has_gpu else Finding("torch", "ok", detail)
    detail = f"{probe['version']} for CUDA {probe['cuda']}, but it sees no GPU"
    if not has_gpu:
        return Finding("torch", "ok", detail)
    return Finding(
        "torch", "fail", detail, "check CUDA_VISIBLE_DEVICES, and that the driver is new enough for this CUDA version"
    )


def _cupti(probe: dict[str, Any], has_gpu: bool) -> Finding:
    if not has_gpu:
        return Finding("CUPTI", "absent", "no GPU to profile")
    if probe.get("cupti"):
        return Finding("CUPTI", "ok", "torch.profiler records CUDA activity")
    return Finding(
        "CUPTI", "fail", "torch.profiler cannot record CUDA activity", f"{_CUDA_TORCH}, or use `--measure events`"
    )


# Triton ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TritonOwner:
    """A distribution that claims the folder `triton/`.

    `intact` tells whether the files on disk are its own, as its RECORD lists them; None if it has no such list.
    """

    name: str
    version: str
    intact: bool | None


def triton_owners(path: Sequence[str] | None = None) -> tuple[TritonOwner, ...]:
    """The installed distributions that own `triton/`, looked for in `path` (default: `sys.path`)."""
    owners = []
    for name in env.TRITON_DISTRIBUTIONS:
        found = metadata.distributions(name=name) if path is None else metadata.distributions(name=name, path=[*path])
        for distribution in found:
            owners.append(TritonOwner(name, distribution.version, _intact(distribution)))
            break  # the first on the path is the one that counts
    return tuple(owners)


def _intact(distribution: metadata.Distribution) -> bool | None:
    """Whether the files of `triton/` have the sizes, and `triton/__init__.py` the hash, that RECORD says."""
    listed = [file for file in distribution.files or () if file.parts[0] == "triton" and file.size is not None]
    if not listed:
        return None
    for file in listed:
        on_disk = Path(str(file.locate()))
        if not on_disk.is_file() or on_disk.stat().st_size != file.size:
            return False
        if file.parts[1:] == ("__init__.py",) and file.hash is not None:
            digest = hashlib.new(file.hash.mode, on_disk.read_bytes()).digest()
            if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != file.hash.value:
                return False
    return True


def triton_clash(owners: Sequence[TritonOwner]) -> Finding:
    """fbtriton must be the only owner of `triton/`: another one overwrites it, or deletes it when it is uninstalled."""
    ours, others = _ours_and_others(owners)
    remedy = " && ".join(_shown(command) for command in repair_commands(owners))
    named = " and ".join(f"{owner.name} {owner.version}" for owner in others)
    if ours and others:
        holders = [owner.name for owner in (ours, *others) if owner.intact]
        holder = f"those of {holders[0]}" if holders else "a mixture"
        detail = f"fbtriton {ours.version} and {named} both own `triton/`; the files are {holder}"
        return Finding("triton", "fail", detail, remedy)
    if others:
        return Finding("triton", "fail", f"{named}, which has no TLX, instead of fbtriton", remedy)
    if ours is None:
        return Finding("triton", "fail", "fbtriton is not installed", remedy)
    if ours.intact is False:
        detail = f"fbtriton {ours.version}, but its files were overwritten or removed by another distribution"
        return Finding("triton", "fail", detail, remedy)
    return Finding("triton", "ok", f"fbtriton {ours.version}, the only owner of `triton/`")


def repair_commands(owners: Sequence[TritonOwner]) -> list[list[str]]:
    """What leaves fbtriton as the only, and complete, owner of `triton/`: nothing if it is that already.

    `--no-deps` keeps pip from touching torch, whose wheels ask for upstream's triton.
    """
    ours, others = _ours_and_others(owners)
    if ours and ours.intact is not False and not others:
        return []
    removals = [["pip", "uninstall", "-y", owner.name] for owner in others]
    version = ours.version if ours else FBTRITON
    return [*removals, ["pip", "install", "--force-reinstall", "--no-deps", f"fbtriton=={version}"]]


def _ours_and_others(owners: Sequence[TritonOwner]) -> tuple[TritonOwner | None, list[TritonOwner]]:
    ours = next((owner for owner in owners if owner.name == "fbtriton"), None)
    return ours, [owner for owner in owners if owner.name != "fbtriton"]


def repair_triton(
    run: Callable[[Sequence[str]], int] = subprocess.call, owners: Sequence[TritonOwner] | None = None
) -> str:
    """Runs the repair commands with this interpreter's pip (or uv); returns what was done, in one sentence.

    Raises `RuntimeError` if a command fails, or if there is neither pip nor uv.
    """
    commands = repair_commands(triton_owners() if owners is None else owners)
    if not commands:
        return "triton: nothing to repair, fbtriton is the only owner of `triton/`"
    for command in commands:
        real = _for_this_interpreter(command)
        status = run(real)
        if status != 0:
            raise RuntimeError(f"`{_shown(real)}` failed with exit status {status}; see its output above")
    return "triton: repaired by " + " && ".join(_shown(command) for command in commands)


def _for_this_interpreter(command: Sequence[str]) -> list[str]:
    """The same pip command for `sys.executable`, also where pip itself is not installed (as in uv's environments)."""
    _, verb, *rest = command
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", verb, *rest]
    uv = shutil.which("uv")
    if uv is None:
        raise RuntimeError("neither pip nor uv is installed; run `python -m ensurepip` and try again")
    return [uv, "pip", verb, "--python", sys.executable, *(option for option in rest if option != "-y")]


_TRITON_PROBE = """
import json, triton
result = {"version": triton.__version__, "tlx": True}
try:
    import triton.language.extra.tlx
except Exception as error:
    result["tlx"] = f"{type(error).__name__}: {error}"
print(json.dumps(result))
"""


def _tlx(probe: dict[str, Any]) -> Finding:
    remedy = "python -m jfabench doctor --repair"
    if "error" in probe:
        return Finding("TLX", "fail", f"triton cannot be imported: {probe['error']}", remedy)
    if probe["tlx"] is not True:
        return Finding("TLX", "fail", f"triton {probe['version']} has no usable TLX: {probe['tlx']}", remedy)
    return Finding("TLX", "ok", f"importable, triton {probe['version']}")


# Compiler, profilers, disk --------------------------------------------------------------------------------------------


def _package(name: str, distribution: str, requirement: str) -> Finding:
    found = env.version(distribution)
    if found is None:
        # pip also installs what torch asks for, upstream's triton included.
        remedy = f"pip install '{requirement}' && python -m jfabench doctor --repair"
        return Finding(name, "absent", f"{distribution} is not installed", remedy)
    return Finding(name, "ok", f"{distribution} {found}")


def _compiler() -> Finding:
    """triton compiles a small C extension for each kernel signature: it needs a compiler and Python's headers."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if not compiler or shutil.which(compiler.split()[0]) is None:
        missing = f"CC={compiler} does not exist" if compiler else "no C compiler"
        return Finding("C compiler", "fail", f"{missing}, which triton needs", "apt-get install gcc, or set CC")
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    if not headers.is_file():
        minor = f"{sys.version_info.major}.{sys.version_info.minor}"
        return Finding(
            "C compiler", "fail", f"{compiler}, but {headers} is missing", f"apt-get install python{minor}-dev"
        )
    return Finding("C compiler", "ok", compiler)


def find_ncu() -> str | None:
    """The `ncu` on PATH, else the newest in the places where CUDA and Nsight Compute install it."""
    if found := shutil.which("ncu"):
        return found
    places = [*Path("/usr/local").glob("cuda*/bin/ncu"), *Path("/opt/nvidia/nsight-compute").glob("*/ncu")]
    places.sort(key=lambda path: [int(number) for number in re.findall(r"\d+", str(path))])
    return str(places[-1]) if places else None


def _ncu() -> Finding:
    name = "Nsight Compute"
    ncu = find_ncu()
    if ncu is None:
        return Finding(name, "absent", "no ncu", "install Nsight Compute for hardware counters")
    version = re.search(r"Version (\S+)", _output([ncu, "--version"]) or "")
    if version is None:
        return Finding(name, "fail", f"{ncu} does not start", f"run `{ncu} --version` to see why, or reinstall it")
    return Finding(name, "ok", f"{version[1]} at {ncu}")


def counter_permission(
    params: Path = Path("/proc/driver/nvidia/params"), status: Path = Path("/proc/self/status")
) -> Finding:
    """Whether this process may read hardware counters: the driver may keep them for those with CAP_SYS_ADMIN.

    Root in a container often lacks that capability, so the user's name says nothing.
    """
    name = "GPU counters"
    restricted = re.search(r"RmProfilingAdminOnly:\s*(\d)", _text(params))
    if restricted is None:
        return Finding(
            name,
            "warn",
            f"{params} does not say who may read them",
            "if ncu fails with ERR_NVGPUCTRPERM: see nvidia.com/ERR_NVGPUCTRPERM",
        )
    if restricted[1] == "0":
        return Finding(name, "ok", "the driver lets every user read them")
    capabilities = re.search(r"CapEff:\s*([0-9a-f]+)", _text(status))
    if capabilities and int(capabilities[1], 16) >> 21 & 1:  # linux/capability.h: CAP_SYS_ADMIN is 21
        return Finding(name, "ok", "kept for administrators; this process has CAP_SYS_ADMIN")
    return Finding(
        name,
        "warn",
        "kept for administrators, and this process lacks CAP_SYS_ADMIN: ncu will fail with ERR_NVGPUCTRPERM",
        "load the driver with NVreg_RestrictProfilingToAdminUsers=0, or start the container with --cap-add=SYS_ADMIN",
    )


def _disk(folder: Path) -> Finding:
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Finding("disk", "fail", f"{folder}: {error}", "use a folder that exists")
    detail = f"{free / 1e9:,.1f} GB free in {folder}"
    if free < 100e6:
        return Finding("disk", "fail", detail, "free at least 1 GB for records and compiled kernels")
    return Finding("disk", "warn" if free < 1e9 else "ok", detail, "free at least 1 GB" if free < 1e9 else "")


# Other processes ------------------------------------------------------------------------------------------------------


class _Probe:
    """Python code that runs in another process, at once, and prints a JSON object."""

    def __init__(self, code: str) -> None:
        pipe, none = subprocess.PIPE, subprocess.DEVNULL
        self._process = subprocess.Popen([sys.executable, "-c", code], stdin=none, stdout=pipe, stderr=pipe, text=True)
        self._answer: dict[str, Any] | None = None

    def answer(self) -> dict[str, Any]:
        """Waits for the object; `{"error": ...}` tells in one line what went wrong."""
        if self._answer is None:
            self._answer = self._wait()
        return self._answer

    def _wait(self) -> dict[str, Any]:
        try:
            out, err = self._process.communicate(timeout=_PROBE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            return {"error": f"no answer within {_PROBE_SECONDS} s"}
        status = self._process.returncode
        if status < 0:
            return {"error": f"killed by signal {-status}"}
        if status > 0:
            return {"error": (err.strip().splitlines() or [f"exit status {status}"])[-1]}
        result: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
        return result


def _output(command: Sequence[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _shown(command: Sequence[str]) -> str:
    return " ".join(command)
