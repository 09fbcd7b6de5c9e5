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
    from jfabench.kernels.attention.offline import Binary, Launch

FlatRow = Mapping[str, str]


class InspectionError(ValueError):
    """Says what was asked for that there is not, and what there is."""


class CompilationError(RuntimeError):
    """Says which kernel does not compile, and why."""


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
    """Cycles of one step by unit, a lower bound; shared memory is None where it is not known."""

    tensor: float
    exponential: float
    shared: float | None
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
ESTIMATES = tuple(f"estimate_{name}" for name in ("tensor_cycles", "exponential_cycles", "shared_cycles", "bound"))
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
    """Compile and describe every kernel, or the one of that name, in every configuration and case."""
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
    # The assembler and the disassembler run beside the compiler, which keeps one core busy.
    with ThreadPoolExecutor(max_workers=2) as pool:
        for i, (launch, arch) in enumerate(launches):
            subject = _subject(launch, arch)
            progress(f"{subject.arch} {launch.name}, {i + 1} of {len(launches)}")
            try:
                binary = offline.compile_launch(launch, arch)
            except Exception as error:
                first = (str(error).strip().splitlines() or [""])[0]
                raise CompilationError(
                    f"{launch.name} does not compile for {subject.arch} with {subject.config} ({subject.case}): "
                    f"{type(error).__name__}: {first}"
                ) from error
            # Other cases may lead to the same code, and both families launch some kernels.
            code = (launch.name, arch, subject.config, binary.ptx)
            if code not in seen:
                seen.add(code)
                found.append(pool.submit(_describe, launch, arch, subject, binary))
        try:
            return [future.result() for future in found]
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            raise _broken(error) from error


def _broken(error: Exception) -> ToolchainError:
    return ToolchainError(f"ptxas and nvdisasm, which come with fbtriton, do not work: {error}; install fbtriton anew")


def _launches(arch: int) -> Iterator[Launch]:
    from jfabench.kernels.attention import offline

    for family, direction in offline.ROLES:
        if (family, arch) in offline.CASES:
            yield from offline.launches(family, direction, arch)


def _subject(launch: Launch, arch: int) -> Subject:
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
        Estimate(cycles.tensor, cycles.exponential, cycles.shared, cycles.bound) if cycles else None,
        offline.compiler(arch),
    )


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


def read_rows(path: Path) -> list[dict[str, str]]:
    """Of a file that `write_rows` wrote, perhaps by another version that counted other instructions."""
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            columns = set(reader.fieldnames or ())
            rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise InspectionError(f"{path} cannot be read as a baseline: {why}") from error
    needed = {*KEY, "role", *COMPARED, *SPILLS, "compiler"}
    missing = sorted(needed - columns)
    if missing:
        raise InspectionError(
            f"{path} is no baseline: it lacks {', '.join(missing)}; take an inspect.csv that `jfabench inspect` wrote"
        )
    for row in rows:
        if not all((row[name] or "").isdigit() for name in (*COMPARED, *SPILLS)):
            raise InspectionError(f"{path} is no baseline: {row['kernel']} has no number where one is needed")
    return rows


# comparing -----------------------------------------------------------------------------------------------------------

COMPARED = {"registers": "registers", "shared_bytes": "bytes of shared memory"}
SPILLS = ("spill_store_bytes", "spill_load_bytes")


@dataclass(frozen=True)
class Comparison:
    """`worse` has a line for each thing that got worse, `notes` for what was not compared, and why."""

    worse: tuple[str, ...]
    notes: tuple[str, ...]
    starts_to_spill: bool
    compared: int


def compare(baseline: Iterable[FlatRow], rows: Iterable[FlatRow]) -> Comparison:
    """Of the kernels in `rows` with those of the same name, configuration and case in `baseline`.

    A kernel that the baseline lacks starts to spill if it spills. Registers of different compilers mean nothing.
    """
    before = {_key(row): row for row in baseline if row["role"] == WHOLE}
    now = {_key(row): row for row in rows if row["role"] == WHOLE}
    compilers = {row["arch"]: row["compiler"] for row in before.values()}
    worse: list[str] = []
    notes: dict[str, None] = {}
    starts = False
    compared = new = 0
    for key, row in now.items():
        used = compilers.get(row["arch"])
        if used is None:
            notes[f"{row['arch']}: not in the baseline"] = None
            continue
        if used != row["compiler"]:
            notes[f"{row['arch']}: not compared, the baseline is of {used} and this is {row['compiler']}"] = None
            continue
        old = before.get(key)
        compared += old is not None
        new += old is None
        was, spilled = _spilled(old) if old else 0, _spilled(row)
        if spilled > was:
            starts = starts or was == 0
            change = f"spills {spilled} bytes, before {was}" if old else f"is new and spills {spilled} bytes"
            worse.append(f"{_name(row)}: {change}")
        for column, unit in COMPARED.items():
            if old and int(row[column]) > int(old[column]):
                worse.append(f"{_name(row)}: {row[column]} {unit}, before {old[column]}")
    if new:
        notes[f"{new} not in the baseline"] = None
    kinds = {(row["arch"], row["kernel"]) for row in now.values()}
    gone = sum((row["arch"], row["kernel"]) in kinds and key not in now for key, row in before.items())
    if gone:
        notes[f"{gone} of the baseline's are not compiled any more"] = None
    return Comparison(tuple(worse), tuple(notes), starts, compared)


def _key(row: FlatRow) -> tuple[str, ...]:
    return tuple(row[name] for name in KEY)


def _spilled(row: FlatRow) -> int:
    return max(int(row[name]) for name in SPILLS)


def _name(row: FlatRow) -> str:
    broadcast = " broadcast" if row["broadcast"] == "True" else ""
    case = f"D={row['head_dim']} group={row['group']} mask={row['mask']}{broadcast}"
    return f"{row['kernel']} {row['arch']} [{row['config']}] {case}"
