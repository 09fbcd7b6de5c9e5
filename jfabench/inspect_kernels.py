"""What the compiler makes of every shipped kernel: registers, spills, shared memory and instructions, without a GPU.

Rows are one a kernel, architecture, configuration, case and role; what belongs to a kernel as a whole, such as its
registers, stands in the rows of all its roles. Kernels whose code is the same in several cases are listed once.
"""

from __future__ import annotations

import csv
import difflib
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from jfabench.sass import KINDS, WHOLE, AssemblerReport, Mix, Region, mixes, parse_assembler

if TYPE_CHECKING:
    from jfabench.kernels.attention.estimate import StepCycles
    from jfabench.kernels.attention.offline import Binary, Launch

FlatRow = Mapping[str, str]


class InspectionError(ValueError):
    """Says what was asked for that there is not, and what there is, or why a file is no baseline."""


class CompilationError(RuntimeError):
    """Says which kernels do not compile, and why; `inspected` are the others."""

    def __init__(self, reasons: Sequence[str], inspected: Sequence[Inspected]) -> None:
        super().__init__("; ".join(reasons))
        self.inspected = inspected


class ToolchainError(RuntimeError):
    """Says what this machine lacks to compile, and the remedy."""


@dataclass(frozen=True)
class Subject:
    """What was compiled: the columns that name a row of the table, but for the role."""

    kernel: str
    arch: str
    direction: str
    config: str
    head_dim: int
    dtype: str
    group: int
    mask: str
    broadcast: bool

    @property
    def case(self) -> str:
        return f"D{self.head_dim} G{self.group} {self.mask}{' bcast' if self.broadcast else ''}"


@dataclass(frozen=True)
class Estimate:
    """Cycles of one step by unit, a lower bound; shared memory is None where it is not known.

    `global_bytes` go beyond the multiprocessor; `memory` is what they take if all are in DRAM, which does not bound.
    """

    tensor: float
    exponential: float
    shared: float | None
    global_bytes: int
    memory: float
    bound: str


@dataclass(frozen=True)
class Inspected:
    """A compiled kernel. The first of `roles` is the whole; there are no others if it has none.

    `unattributed`: it has roles, which the line table does not tell apart.
    """

    subject: Subject
    assembler: AssemblerReport
    shared_bytes: int
    tmem_columns: int
    roles: tuple[Mix, ...]
    unattributed: bool
    estimate: Estimate | None
    compiler: str

    @property
    def spilled_bytes(self) -> int:
        return max(self.assembler.spill_store_bytes, self.assembler.spill_load_bytes)


KEY = tuple(Subject.__dataclass_fields__)
_UNITS = ("tensor_cycles", "exponential_cycles", "shared_cycles", "global_bytes", "memory_cycles", "bound")
ESTIMATES = tuple(f"estimate_{name}" for name in _UNITS)
COLUMNS = (
    *KEY,
    "role",
    "copies",
    *AssemblerReport._fields,
    "shared_bytes",
    "tmem_columns",
    *KINDS,
    *ESTIMATES,
    "compiler",
)


# compiling -----------------------------------------------------------------------------------------------------------


def _offline() -> ModuleType:
    """The module that compiles: with torch and triton, which may be missing."""
    try:
        from jfabench.kernels.attention import offline
    except ImportError as error:
        raise ToolchainError(
            f"kernels are compiled with torch and fbtriton, which cannot be imported: {error}; "
            "`python -m jfabench doctor` says what to do"
        ) from error
    return offline


def architectures(words: str | None) -> tuple[int, ...]:
    """Of `sm_90,sm_100`, or all there are kernels for."""
    offline = _offline()
    if words is None:
        return tuple(offline.ARCHITECTURES)
    known = {f"sm_{arch}": arch for arch in offline.ARCHITECTURES}
    names = [word.strip() for word in words.split(",") if word.strip()]
    for name in names:
        if name not in known:
            raise InspectionError(f"--arch {name}: no such architecture{_nearest(name, known)}")
    if not names:
        raise InspectionError(f"--arch needs one of {', '.join(known)}")
    return tuple(dict.fromkeys(known[name] for name in names))


def _nearest(word: str, known: Iterable[str]) -> str:
    names = list(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    return (
        f" (did you mean {close[0]!r}?); known are {', '.join(names)}" if close else f"; known are {', '.join(names)}"
    )


def inspect_kernels(
    archs: Sequence[int], kernel: str | None = None, progress: Callable[[str], None] = lambda _: None
) -> list[Inspected]:
    """Compile and describe every kernel, or the one of that name, in every configuration and case.

    Raises `CompilationError` at the end, with all that do compile.
    """
    from concurrent.futures import ThreadPoolExecutor

    offline = _offline()
    try:
        launches = [(launch, arch) for arch in archs for launch in _launches(arch)]
        for arch in archs:
            offline.compiler(arch)
    except offline.InterpretedError as error:
        raise ToolchainError(str(error)) from error
    except (OSError, subprocess.SubprocessError) as error:
        raise _broken(error) from error
    if kernel is not None:
        known = sorted({launch.name for launch, _ in launches})
        if kernel not in known:
            where = ", ".join(f"sm_{arch}" for arch in archs)
            raise InspectionError(f"--kernel {kernel}: no such kernel for {where}{_nearest(kernel, known)}")
        launches = [(launch, arch) for launch, arch in launches if launch.name == kernel]
    seen = set()
    found = []
    reasons = []
    # The assembler and the disassembler run beside the compiler, which keeps one core busy.
    with ThreadPoolExecutor(max_workers=2) as pool:
        for i, (launch, arch) in enumerate(launches):
            subject = subject_of(launch, arch)
            progress(f"{subject.arch} {launch.name}, {i + 1} of {len(launches)}")
            try:
                binary = offline.compile_launch(launch, arch)
            except Exception as error:
                first = (str(error).strip().splitlines() or [""])[0]
                reasons.append(
                    f"{launch.name} does not compile for {subject.arch} with {subject.config} ({subject.case}): "
                    f"{type(error).__name__}: {first}"
                )
                continue
            # Other cases may lead to the same code, and both families launch some kernels.
            code = (launch.name, arch, subject.config, binary.ptx)
            if code not in seen:
                seen.add(code)
                found.append(pool.submit(_describe, launch, arch, subject, binary))
        try:
            inspected = [future.result() for future in found]
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            raise _broken(error) from error
    if reasons:
        raise CompilationError(reasons, inspected)
    return inspected


def _broken(error: Exception) -> ToolchainError:
    return ToolchainError(f"ptxas and nvdisasm, which come with fbtriton, do not work: {error}; install fbtriton anew")


def _launches(arch: int) -> Iterator[Launch]:
    from jfabench.kernels.attention import offline

    for family, direction in offline.ROLES:
        if (family, arch) in offline.CASES:
            yield from offline.launches(family, direction, arch)


def subject_of(launch: Launch, arch: int) -> Subject:
    """What `launch`, compiled for `arch`, is in the table."""
    from jfabench.kernels.attention import offline

    config = " ".join(f"{name}={value}" for name, value in launch.config.items())
    dtype = str(offline.DTYPE).removeprefix("torch.")
    case = launch.case
    return Subject(
        launch.name,
        f"sm_{arch}",
        launch.direction,
        config,
        case.head_dim,
        dtype,
        case.group,
        case.mask,
        case.broadcast,
    )


def _describe(launch: Launch, arch: int, subject: Subject, binary: Binary) -> Inspected:
    from jfabench.kernels.attention import estimate, offline

    regions = [Region(task.role, task.copies, task.file, task.first, task.last) for task in offline.tasks(launch)]
    roles = tuple(mixes(offline.disassembly(binary.cubin), regions))
    cycles = estimate.step_cycles(launch.name, launch.config, launch.case.head_dim, arch)
    return Inspected(
        subject,
        parse_assembler(offline.assembler_report(binary.ptx, arch)),
        binary.shared_bytes,
        binary.tmem_columns,
        roles,
        bool(regions) and len(roles) == 1,
        _estimate(cycles) if cycles else None,
        offline.compiler(arch),
    )


def _estimate(cycles: StepCycles) -> Estimate:
    units = cycles.tensor, cycles.exponential, cycles.shared
    return Estimate(*units, cycles.global_bytes, round(cycles.memory, 1), cycles.bound)


# CSV -----------------------------------------------------------------------------------------------------------------


def flat_rows(inspected: Iterable[Inspected]) -> list[dict[str, str]]:
    """One a kernel and role, all values as text."""
    rows = []
    for kernel in inspected:
        for mix in kernel.roles:
            estimate = kernel.estimate if mix.role == WHOLE else None
            values = {
                **asdict(kernel.subject),
                "role": mix.role,
                "copies": mix.copies,
                **kernel.assembler._asdict(),
                "shared_bytes": kernel.shared_bytes,
                "tmem_columns": kernel.tmem_columns,
                **mix.counts,
                **dict(
                    zip(ESTIMATES, asdict(estimate).values() if estimate else (None,) * len(ESTIMATES), strict=True)
                ),
                "compiler": kernel.compiler,
            }
            rows.append({name: "" if values[name] is None else str(values[name]) for name in COLUMNS})
    return rows


def write_rows(path: Path, rows: Iterable[FlatRow]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
