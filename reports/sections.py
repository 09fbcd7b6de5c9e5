"""What the tuning commands leave in a result folder, as sections of the report: tables and pictures.

Each command writes plain files (`inspect.csv`, `waterfall.csv`, ...). A `Source` says which these are, which of their
columns people read first, and how to get them; a new command needs one more `Source`.
"""

from __future__ import annotations

import base64
import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

MOST_ROWS = 400
MOST_PICTURES = 12


@dataclass(frozen=True)
class TableSource:
    """A CSV file of the folder, and those of its columns that are shown where it has them: all if none are named."""

    file: str
    columns: tuple[str, ...] = ()


@dataclass(frozen=True)
class Source:
    """A section: `about` is what its numbers are, `command` gets them, `pictures` are patterns of PNG files."""

    anchor: str
    title: str
    about: str
    command: str
    tables: tuple[TableSource, ...]
    pictures: tuple[str, ...] = ()


SOURCES = (
    Source(
        "counters",
        "Hardware counters",
        "Counted by Nsight Compute while kernels are replayed, per call: rates are means weighted with the times of "
        "kernels, amounts are sums. dram_over_minimal is the DRAM traffic over the bytes moved if each is moved once. "
        "Times under replay are no benchmark times: tflops and roofline_fraction are from the measured results.",
        "python -m jfabench profile --config CONFIG --out DIR",
        (
            TableSource(
                "counters_wide.csv",
                (
                    *("label", "provider", "direction", "main_kernel", "launches_per_call"),
                    *("tensor_pipe_pct", "tmem_pct", "exp_pipe_pct", "issue_active_pct", "sm_busy_pct", "imbalance"),
                    *("dram_pct", "dram_bytes", "dram_over_minimal", "l2_hit_pct", "local_bytes"),
                    *("registers", "occupancy_pct", "tflops", "roofline_fraction"),
                    *("stall_barrier", "stall_gmma", "stall_long_scoreboard", "stall_math_pipe_throttle"),
                    *("stall_mio_throttle", "stall_short_scoreboard", "stall_sleeping", "stall_wait"),
                ),
            ),
        ),
    ),
    Source(
        "timeline",
        "Timeline",
        "Time stamps from inside the kernels: when each multiprocessor worked on which tile, how evenly that came out, "
        "and what its warp groups waited for. Recording slows a kernel down a little.",
        "python -m jfabench timeline --config CONFIG --out DIR",
        (TableSource("timeline_cases.csv"), TableSource("waits.csv")),
        ("charts/timeline*.png", "timeline*.png"),
    ),
    Source(
        "schedule",
        "Predicted schedules",
        "Predicted, not measured: which multiprocessor would compute which tile when under each policy, if a tile of n "
        "steps costs a + b n. makespan_over_bound compares with the least time that any schedule needs, imbalance the "
        "busiest multiprocessor with the average.",
        "python -m jfabench schedule --config CONFIG --sms 132 --out DIR",
        (
            TableSource(
                "schedule.csv",
                (
                    *("label", "direction", "sms", "policy", "tiles", "makespan", "lower_bound", "unit"),
                    *("makespan_over_bound", "imbalance", "busy_share", "predicted_call_s", "cost_gpu"),
                ),
            ),
        ),
        ("schedule-*.png",),
    ),
    Source(
        "waterfall",
        "What each stage costs",
        "Wrong by design: the kernel of each case, and variants of it that leave one stage out, timed in turns. saved "
        "is the share of the time that a stage takes and the rest does not hide. These times are in no speedup and in "
        "no other table.",
        "python -m jfabench waterfall --config CONFIG --out DIR",
        (
            TableSource(
                "waterfall.csv",
                (
                    *("label", "direction", "variant", "results", "median_s", "saved", "saved_low", "saved_high"),
                    *("text", "gpu"),
                ),
            ),
        ),
        ("waterfall*.png",),
    ),
    Source(
        "inspect",
        "What the compiler made",
        "Compiled, not run: registers, spills and shared memory of every shipped kernel, and the instructions in the "
        "code of each role. The estimates are the least cycles of a step of the inner loop, by unit of a "
        "multiprocessor.",
        "python -m jfabench inspect --arch sm_90 --out DIR",
        (
            TableSource(
                "inspect.csv",
                (
                    *("kernel", "arch", "direction", "config", "head_dim", "group", "mask", "broadcast"),
                    *("role", "copies"),
                    *("registers", "spill_store_bytes", "spill_load_bytes", "barriers", "shared_bytes", "tmem_columns"),
                    *("instructions", "tensor", "tma_load", "tma_store", "tma_reduce", "tmem_load", "tmem_store"),
                    *("exp2", "mbarrier_try", "barrier_sync", "local_load", "local_store"),
                    *("estimate_tensor_cycles", "estimate_exponential_cycles", "estimate_shared_cycles"),
                    *("estimate_global_bytes", "estimate_bound"),
                ),
            ),
        ),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Table:
    """`rows` of `file`, at most MOST_ROWS of its `total`; `numeric` says of each column whether it holds numbers."""

    file: str
    columns: tuple[str, ...]
    numeric: tuple[bool, ...]
    rows: tuple[tuple[str, ...], ...]
    total: int


@dataclass(frozen=True)
class Picture:
    """`name` is the file's, without its ending; `data` is a `data:` URL."""

    name: str
    data: str


@dataclass(frozen=True)
class Section:
    """What there is of a source; `problems` are sentences on files that could not be read."""

    source: Source
    tables: tuple[Table, ...]
    pictures: tuple[Picture, ...]
    left_out: int
    problems: tuple[str, ...]

    @property
    def found(self) -> bool:
        return bool(self.tables or self.pictures or self.problems)


def sections(folders: Iterable[Path]) -> list[Section]:
    """A section for each source, from the first of the folders that has any of its files."""
    roots = list(dict.fromkeys(folders))
    return [_section(source, roots) for source in SOURCES]


def _section(source: Source, roots: Sequence[Path]) -> Section:
    empty = Section(source, (), (), 0, ())
    return next((section for root in roots if (section := _read(source, root)).found), empty)


def _read(source: Source, root: Path) -> Section:
    tables, pictures, problems = [], [], []
    for wanted in source.tables:
        if not (root / wanted.file).is_file():
            continue
        try:
            tables.append(_table(root / wanted.file, wanted))
        except (OSError, ValueError, csv.Error) as error:
            problems.append(f"{wanted.file} could not be read: {error}")
    paths = sorted({path for pattern in source.pictures for path in root.glob(pattern)})
    for path in paths[:MOST_PICTURES]:
        try:
            pictures.append(_picture(path))
        except (OSError, ValueError) as error:
            problems.append(f"{path.name} could not be read: {error}")
    return Section(source, tuple(tables), tuple(pictures), max(0, len(paths) - MOST_PICTURES), tuple(problems))


def _table(path: Path, wanted: TableSource) -> Table:
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        found = list(reader.fieldnames or ())
        lines = list(reader)
    shown = [name for name in (wanted.columns or found) if name in found]
    if not shown:
        raise ValueError("it has none of the columns that belong there")
    kept = [name for name in shown if any(line[name] for line in lines)] or shown  # a column of nothing says nothing
    values = [[line[name] or "" for line in lines] for name in kept]
    numeric = tuple(any(column) and all(_is_number(value) for value in column if value) for column in values)
    texts = [
        [_short(value) if number else value for value in column] for column, number in zip(values, numeric, strict=True)
    ]
    rows = tuple(tuple(column[i] for column in texts) for i in range(min(len(lines), MOST_ROWS)))
    return Table(path.name, tuple(kept), numeric, rows, len(lines))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _short(text: str) -> str:
    """A number with five digits; one that is whole as it is."""
    if not text or text.lstrip("-").isdigit():
        return text
    value = float(text)
    return f"{value:,.0f}" if abs(value) >= 1e5 and abs(value) < 1e15 else f"{value:.5g}"


def _picture(path: Path) -> Picture:
    content = path.read_bytes()
    if not content.startswith(b"\x89PNG"):
        raise ValueError("it is no PNG file")
    return Picture(path.stem, "data:image/png;base64," + base64.b64encode(content).decode())
