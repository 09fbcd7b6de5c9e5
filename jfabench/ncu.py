"""Nsight Compute (`ncu`): which counters to ask for, its command line, and what its output says.

`METRICS` is the one table from names that mean the same on every GPU (`tensor_pipe_pct`) to those of one architecture.
Nothing here needs a GPU, and nothing here raises for what `ncu` does: its refusals become a `Problem` with a remedy.
"""

from __future__ import annotations

import csv
import math
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from jfabench.ranges import DOMAIN, include_filter, range_name

Choice = Literal["roofline", "tensor", "memory", "stalls", "all"]
CHOICES: tuple[Choice, ...] = get_args(Choice)

CHIPS = {"sm_90": "gh100", "sm_100": "gb100"}
"""The architectures that the table covers, oldest first, and what `ncu --chip` calls them."""

# The table of metrics -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Metric:
    """A counter. `raw` is its name for `ncu`, or one for each architecture that has it.

    `unit` is what its values have after `to_si`. `combine` says how the launches of a call become one number: `sum`,
    `mean` (weighted with the launches' durations) or `max`. `sets` are the choices that include it, beside `all`.
    """

    name: str
    raw: str | Mapping[str, str]
    unit: str
    combine: Literal["sum", "mean", "max"]
    sets: tuple[Choice, ...] = ()

    def raw_on(self, architecture: str) -> str | None:
        return self.raw if isinstance(self.raw, str) else self.raw.get(architecture)


_ALWAYS: tuple[Choice, ...] = ("roofline", "tensor", "memory", "stalls")
_STALLS = (
    "barrier", "branch_resolving", "dispatch_stall", "drain", "gmma", "imc_miss", "lg_throttle", "long_scoreboard",
    "math_pipe_throttle", "membar", "mio_throttle", "misc", "no_instruction", "not_selected", "selected",
    "short_scoreboard", "sleeping", "tex_throttle", "wait",
)  # fmt: skip
_STALLS_OF_HOPPER_ALONE = ("gmma", "imc_miss")


def _stall(reason: str) -> Metric:
    """Warps that wait for this reason, for each cycle in which a warp issued an instruction."""
    raw = f"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio"
    return Metric(
        f"stall_{reason}", {"sm_90": raw} if reason in _STALLS_OF_HOPPER_ALONE else raw, "inst", "mean", ("stalls",)
    )


_ACTIVE, _ELAPSED = "avg.pct_of_peak_sustained_active", "avg.pct_of_peak_sustained_elapsed"
_TENSOR_PIPE = {"sm_90": "sm__pipe_tensor_cycles_active", "sm_100": "sm__pipe_tc_cycles_active"}

METRICS: tuple[Metric, ...] = (
    Metric("duration_s", "gpu__time_duration.sum", "s", "sum", _ALWAYS),  # weighs the launches of a call, too
    # How busy, and how evenly.
    Metric("sm_busy_pct", f"sm__throughput.{_ELAPSED}", "%", "mean", ("roofline", "tensor")),
    Metric("sm_cycles_active_min", "sm__cycles_active.min", "cycle", "mean", ("roofline",)),
    Metric("sm_cycles_active_avg", "sm__cycles_active.avg", "cycle", "mean", ("roofline", "tensor")),
    Metric("sm_cycles_active_max", "sm__cycles_active.max", "cycle", "mean", ("roofline", "tensor")),
    Metric("sm_cycles_elapsed_avg", "sm__cycles_elapsed.avg", "cycle", "mean", ("roofline", "tensor")),
    # Tensor cores. `active` counts only cycles in which the SM had work, so that imbalance does not lower it.
    Metric(
        "tensor_pipe_pct",
        {arch: f"{raw}.{_ACTIVE}" for arch, raw in _TENSOR_PIPE.items()},
        "%",
        "mean",
        ("roofline", "tensor"),
    ),
    Metric(
        "tensor_pipe_elapsed_pct",
        {arch: f"{raw}.{_ELAPSED}" for arch, raw in _TENSOR_PIPE.items()},
        "%",
        "mean",
        ("roofline", "tensor"),
    ),
    Metric(
        "tensor_inst",
        {"sm_90": "sm__inst_executed_pipe_tensor_op_gmma.sum", "sm_100": "sm__inst_executed_pipe_tc.sum"},
        "inst",
        "sum",
        ("tensor",),
    ),
    Metric("tensor_2cta_inst", {"sm_100": "sm__inst_executed_pipe_tc_scope_2cta.sum"}, "inst", "sum", ("tensor",)),
    Metric("tmem_pct", {"sm_100": f"sm__mem_tensor_cycles_active.{_ACTIVE}"}, "%", "mean", ("roofline", "tensor")),
    Metric("tmem_inst", {"sm_100": "sm__inst_executed_pipe_tmem.sum"}, "inst", "sum", ("tensor",)),
    Metric("tmem_reads", {"sm_100": "sm__mem_tensor_reads.sum"}, "", "sum", ("tensor",)),
    Metric("tmem_writes", {"sm_100": "sm__mem_tensor_writes.sum"}, "", "sum", ("tensor",)),
    Metric("exp_pipe_pct", f"sm__inst_executed_pipe_xu.{_ACTIVE}", "%", "mean", ("tensor",)),
    Metric("issue_active_pct", f"smsp__issue_active.{_ACTIVE}", "%", "mean", ("tensor", "stalls")),
    # Memory.
    Metric("dram_bytes", "dram__bytes.sum", "byte", "sum", ("roofline", "memory")),
    Metric("dram_read_bytes", "dram__bytes_read.sum", "byte", "sum", ("memory",)),
    Metric("dram_write_bytes", "dram__bytes_write.sum", "byte", "sum", ("memory",)),
    Metric("dram_pct", f"dram__throughput.{_ELAPSED}", "%", "mean", ("roofline", "memory")),
    Metric("l2_hit_pct", "lts__t_sector_hit_rate.pct", "%", "mean", ("roofline", "memory")),
    Metric("l2_bytes", "lts__t_bytes.sum", "byte", "sum", ("memory",)),
    Metric("bank_conflicts", "l1tex__data_bank_conflicts_pipe_lsu.sum", "", "sum", ("memory",)),
    # Spills: traffic between registers and local memory.
    Metric("local_load_bytes", "l1tex__t_bytes_pipe_lsu_mem_local_op_ld.sum", "byte", "sum", ("roofline", "memory")),
    Metric("local_store_bytes", "l1tex__t_bytes_pipe_lsu_mem_local_op_st.sum", "byte", "sum", ("roofline", "memory")),
    Metric("local_load_inst", "smsp__inst_executed_op_local_ld.sum", "inst", "sum", ("memory",)),
    Metric("local_store_inst", "smsp__inst_executed_op_local_st.sum", "inst", "sum", ("memory",)),
    # What fits onto an SM.
    Metric("registers", "launch__registers_per_thread", "register/thread", "max", _ALWAYS),
    Metric("occupancy_pct", f"sm__warps_active.{_ACTIVE}", "%", "mean", ("roofline", "stalls")),
    *map(_stall, _STALLS),
)
BY_NAME = {metric.name: metric for metric in METRICS}


def nearest_architecture(capability: tuple[int, int] | None) -> str:
    """The architecture of the table that speaks for a compute capability: its own, else the newest before it."""
    if capability is None:
        return next(iter(CHIPS))
    older = [name for name in CHIPS if int(name.removeprefix("sm_")) <= 10 * capability[0] + capability[1]]
    return older[-1] if older else next(iter(CHIPS))


def select(
    choice: Choice, architecture: str, known: frozenset[str] | None = None
) -> tuple[dict[str, Metric], tuple[str, ...]]:
    """The metrics of a choice by raw name, and the raw names that are left out because this `ncu` lacks them.

    `known` is what `known_metrics` returned. Launch parameters (`launch__...`) are never in that list.
    """
    chosen: dict[str, Metric] = {}
    unknown = []
    for metric in METRICS:
        raw = metric.raw_on(architecture)
        if raw is None or (choice != "all" and choice not in metric.sets):
            continue
        if known is None or raw.startswith("launch__") or base_name(raw) in known:
            chosen[raw] = metric
        else:
            unknown.append(raw)
    return chosen, tuple(unknown)


def base_name(raw: str) -> str:
    """`sm__cycles_active` of `sm__cycles_active.avg`."""
    return raw.partition(".")[0]


# Asking ncu -----------------------------------------------------------------------------------------------------------


def known_metrics(ncu: str, chip: str | None, timeout: float = 60.0) -> frozenset[str] | None:
    """The base names that this `ncu` lists for a chip (None: for the GPU that is there); None where it does not tell.

    With a chip named it needs neither a GPU nor a permission.
    """
    command = [ncu, "--query-metrics", *(["--chip", chip] if chip else [])]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=timeout, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return frozenset(re.findall(r"^\s*([a-z]\w*__\w+)", done.stdout, re.MULTILINE)) or None


def command(
    ncu: str, ranges: Sequence[str], metrics: Sequence[str], program: Sequence[str], *, log: Path, report: Path | None
) -> list[str]:
    """The command line that runs `program` and counts the kernels launched inside any of the NVTX `ranges`.

    What `ncu` says, the counters as CSV included, goes to `log`; with a `report`, the counters go there instead, and
    `import_command` prints them.
    """
    filters = [word for name in ranges for word in ("--nvtx-include", include_filter(name))]
    where = ["--force-overwrite", "--export", str(report)] if report else ["--csv", "--print-units", "base"]
    return [
        ncu,
        "--nvtx",
        "--nvtx-push-pop-scope",  # autograd launches a backward's kernels from another thread
        "process",
        *filters,
        "--target-processes",
        "all",
        "--replay-mode",
        "kernel",
        "--clock-control",  # locking the clocks needs a permission of its own, and they are not ours to change
        "none",
        "--set",
        "none",
        "--metrics",
        ",".join(metrics),
        *where,
        "--log-file",
        str(log),
        *program,
    ]


def import_command(ncu: str, report: Path) -> list[str]:
    return [ncu, "--import", str(report), "--csv", "--page", "raw", "--print-units", "base"]


# What it answers ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reading:
    """One counter of one kernel launch, in SI units. `value` is None where `ncu` has none (`n/a`).

    `launch` numbers the launches of one output in their order; `ranges` is the text that lists the NVTX ranges around
    the launch, empty where `ncu` did not print them.
    """

    launch: int
    kernel: str
    raw: str
    value: float | None
    unit: str
    ranges: str = ""

    def is_in(self, name: str) -> bool:
        """Whether the kernel was launched inside `jfabench.ranges.nvtx_range(name)`."""
        return f'"{DOMAIN}:{range_name(name)}:' in self.ranges


def read_csv(text: str) -> list[Reading]:
    """The readings in an output of `ncu --csv`, whichever of its two forms it has.

    Printed while profiling, it has one row a counter; printed from a report (`--page raw`), one row a launch and one
    column a counter, with the units in a second line. Lines of other kinds are skipped, and so are torn ones.
    """
    return list(_readings(text))


def _readings(text: str) -> Iterator[Reading]:
    header: list[str] = []
    units: dict[str, str] = {}
    # A line without its last quote is torn: half a number would be a wrong one.
    for row in csv.reader(line for line in text.splitlines() if line.startswith('"') and line.endswith('"')):
        if row[0] == "ID":
            header, units = row, {}
            continue
        if not header or len(row) != len(header):
            continue
        cells = dict(zip(header, row, strict=True))
        if not cells["ID"]:
            units = cells
            continue
        if not cells["ID"].isdigit():
            continue
        ranges = next((value for name, value in cells.items() if "Push/Pop_Range" in name), "")
        if "Metric Name" in cells:
            counters = [(cells["Metric Name"], cells["Metric Value"], cells["Metric Unit"])]
        else:
            counters = [(name, value, units.get(name, "")) for name, value in cells.items() if "__" in name]
        for raw, value_text, unit_text in counters:
            number = read_number(value_text)
            factor, unit = to_si(unit_text)
            value = None if number is None else number * factor
            yield Reading(int(cells["ID"]), cells.get("Kernel Name", ""), raw, value, unit, ranges)


def read_number(text: str) -> float | None:
    """`1,412,710` as 1412710.0; None for `n/a` and whatever else is no finite number."""
    try:
        value = float(text.strip().replace(",", ""))
    except ValueError:
        return None
    return value if math.isfinite(value) else None


_PREFIXES = {"": 1.0, "n": 1e-9, "u": 1e-6, "m": 1e-3, "K": 1e3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SYMBOLS = {"s": "s", "sec": "s", "second": "s", "byte": "byte", "hz": "hz", "Hz": "hz"}
_WITH_PREFIX = re.compile(r"([numKkMGT]?)(seconds?|sec|s|bytes?|[Hh]z)")


def to_si(unit: str) -> tuple[float, str]:
    """The factor that takes a value in `ncu`'s unit to base units, and their name: `Kbyte/block` is 1000 `byte/block`.

    Units that are no multiples of others (`%`, `cycle`, `inst`, `register/thread`) stay as they are.
    """
    factor = 1.0
    names = []
    for position, part in enumerate(unit.strip().split("/")):
        if match := _WITH_PREFIX.fullmatch(part):
            prefix, name = match.groups()
            factor *= _PREFIXES[prefix] ** (1 if position == 0 else -1)
            part = _SYMBOLS[name if name in _SYMBOLS else name.removesuffix("s")]
        names.append(part)
    return factor, "/".join(names)


# Where it fails -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """Why there are no counters, and what to do about it, in one sentence. `fatal`: it would be so for every case."""

    message: str
    fatal: bool


_MISMATCH = (
    "this Nsight Compute and the NVIDIA driver do not fit together: update the driver, or put the ncu of the CUDA "
    "version that `nvidia-smi` shows first on PATH"
)
_PROBLEMS: tuple[tuple[str, str], ...] = (
    (
        r"ERR_NVGPUCTRPERM",
        "this user may not read the GPU's performance counters (ERR_NVGPUCTRPERM): run as root, start the container "
        "with --cap-add=SYS_ADMIN, or load the driver with NVreg_RestrictProfilingToAdminUsers=0",
    ),
    (r"driver is not compatible|Failed to load Nsight Compute CUDA modules", _MISMATCH),
    (
        r"[Pp]rofiling is not supported on",
        "this Nsight Compute cannot profile this GPU: install a version that knows it, and note that virtual machines "
        "(WSL, vGPU) need profiling enabled on the host",
    ),
    (
        r"nsight-compute-lock",
        "ncu cannot use its lock file, which another user made: set TMPDIR to a folder of your own, and try again",
    ),
    (
        r"already in use|[Aa]nother (?:instance|process|tool|profiler)",
        "another profiler is using the GPU's counters: end it (for DCGM: `dcgmi profile --pause`), and try again",
    ),
    (
        r"unrecogni[sz]ed option",
        "this Nsight Compute is too old, it does not know an option that is needed: install 2022.1 or newer",
    ),
)
_NO_KERNEL = r"No kernels were profiled"


def explain(output: str) -> Problem | None:
    """What went wrong according to the output of `ncu`; None where it names nothing that is known."""
    for pattern, message in _PROBLEMS:
        if re.search(pattern, output):
            return Problem(message, fatal=True)
    if re.search(_NO_KERNEL, output):
        return Problem("ncu saw no kernel inside the ranges of the measured calls (is the package nvtx there?)", False)
    return None


def refused_metrics(output: str) -> frozenset[str]:
    """The base names of metrics over which `ncu` stopped because it does not know them."""
    found = re.findall(r"Failed to find metric\s+(?:regex:)?[\^'\"]?(\w+)", output)
    return frozenset(found)


def messages(output: str) -> str:
    """The lines in which `ncu` speaks of errors and warnings."""
    return "\n".join(line for line in output.splitlines() if re.match(r"==(ERROR|WARNING)==", line))
