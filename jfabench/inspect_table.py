"""Prints what `inspect_kernels` found: a table for each kernel and architecture, then the estimates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jfabench.inspect_compare import Comparison
from jfabench.inspect_kernels import Inspected
from jfabench.sass import Mix

MIX: dict[str, tuple[str, ...]] = {  # heading, and what is counted, of each of a column's numbers
    "instr": ("instructions",),
    "tensor": ("tensor",),
    "TMA\nld/st/red": ("tma_load", "tma_store", "tma_reduce"),
    "TMEM\nld/st": ("tmem_load", "tmem_store"),
    "exp2": ("exp2",),
    "waits\nmbar/bar": ("mbarrier_try", "barrier_sync"),
    "local\nld/st": ("local_load", "local_store"),
    "fp32": ("fp32",),
}
FIGURES: dict[str, Callable[[Inspected], str]] = {
    "regs": lambda kernel: str(kernel.assembler.registers),
    "spill\nst/ld": lambda kernel: _spills(kernel),
    "shared\nbytes": lambda kernel: str(kernel.shared_bytes),
    "TMEM\ncols": lambda kernel: str(kernel.tmem_columns),
    "bar": lambda kernel: str(kernel.assembler.barriers),
}


def show(inspected: Sequence[Inspected], console: Console) -> None:
    ordered = sorted(inspected, key=lambda kernel: (kernel.subject.arch != "sm_90", kernel.subject.arch))
    for arch, kernels in groupby(ordered, key=lambda kernel: kernel.subject.arch):
        group = sorted(kernels, key=lambda kernel: kernel.subject.kernel)
        for name, same in groupby(group, key=lambda kernel: kernel.subject.kernel):
            _show_kernel(f"{name} {arch}", list(same), console)
    _show_estimates(ordered, console)
    console.print(
        "Spills are in bytes, and instructions are counted in the code, not as executed: a role of several copies (x2) "
        "with all of them, in `rest` what belongs to no role or lost its line, and each wait for an mbarrier twice. "
        f"Compilers: {'; '.join(sorted({f'{k.subject.arch} {k.compiler}' for k in inspected}))}.",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def _show_kernel(title: str, kernels: Sequence[Inspected], console: Console) -> None:
    # Configurations are too long for a column: they get a number, and what differs between them is said once.
    configs = list(dict.fromkeys(kernel.subject.config for kernel in kernels))
    common = [field for field in configs[0].split() if all(field in config.split() for config in configs)]
    console.print(f"\n[bold]{escape(title)}[/]", highlight=False)
    for i, config in enumerate(configs if len(configs) > 1 else ()):
        own = " ".join(field for field in config.split() if field not in common)
        console.print(f"  config {i}: {own}", markup=False, highlight=False, soft_wrap=True)
    if common:
        label = "  every config" if len(configs) > 1 else "  config"
        console.print(f"{label}: {' '.join(common)}", markup=False, highlight=False, soft_wrap=True)
    # A column of zeros, such as of tensor memory on Hopper, says nothing.
    mix = {
        heading: names
        for heading, names in MIX.items()
        if any(kernel.roles[0].counts[name] for kernel in kernels for name in names)
    }
    figures = {heading: show for heading, show in FIGURES.items() if any(show(kernel) != "0" for kernel in kernels)}
    specialised = any(len(kernel.roles) > 1 for kernel in kernels)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in (*(["cfg"] if len(configs) > 1 else []), "case", *(["role"] if specialised else [])):
        table.add_column(heading, overflow="fold")
    for heading in (*figures, *mix):
        table.add_column(heading, justify="right", overflow="fold")
    for kernel in sorted(kernels, key=lambda kernel: configs.index(kernel.subject.config)):
        number = [str(configs.index(kernel.subject.config))] if len(configs) > 1 else []
        for i, role in enumerate(kernel.roles):
            lead = [*(number and [""]), ""] if i else [*number, kernel.subject.case]
            names_of_role = [_label(role)] if specialised else []
            values = ["" if i else show(kernel) for show in figures.values()]
            table.add_row(*lead, *names_of_role, *values, *(_numbers(role, names) for names in mix.values()))
    console.print(table)
    if any(kernel.unattributed for kernel in kernels):
        console.print("  Where no roles are listed, the line table does not tell them apart.", highlight=False)


def _spills(kernel: Inspected) -> str:
    if not kernel.spilled_bytes:
        return "0"
    return f"[red]{kernel.assembler.spill_store_bytes}/{kernel.assembler.spill_load_bytes}[/]"


def _label(role: Mix) -> str:
    return role.role if role.copies == 1 else f"{role.role} x{role.copies}"


def _numbers(role: Mix, names: Sequence[str]) -> str:
    return "/".join(str(role.counts[name]) for name in names)


def _show_estimates(kernels: Sequence[Inspected], console: Console) -> None:
    table = Table(
        title="estimate: the least cycles of one step of the inner loop, by unit of a multiprocessor",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for heading in ("kernel", "arch", "cfg", "D"):
        table.add_column(heading, overflow="fold")
    for heading in ("tensor", "exponential", "shared", "bound", "bytes moved", "if in DRAM"):
        table.add_column(heading, justify="right")
    numbers: dict[tuple[str, str], dict[str, str]] = {}  # as in the kernels' own tables
    rows: dict[tuple[str, ...], dict[str, None]] = {}  # which configurations have the same estimate
    for kernel in kernels:
        subject, estimate = kernel.subject, kernel.estimate
        configs = numbers.setdefault((subject.kernel, subject.arch), {})
        number = configs.setdefault(subject.config, str(len(configs)))
        if estimate is None:
            continue
        cycles = [
            "unknown" if value is None else f"{value:,.0f}"
            for value in (estimate.tensor, estimate.exponential, estimate.shared)
        ]
        bound = estimate.bound if estimate.shared is not None else f"{estimate.bound}, or shared"
        moved = f"{estimate.global_bytes:,}", f"{estimate.memory:,.0f}"
        row = (subject.kernel, subject.arch, str(subject.head_dim), *cycles, bound, *moved)
        rows.setdefault(row, {})[number] = None
    for name, arch, *cells in sorted(rows):
        same = rows[name, arch, *cells] if len(numbers[name, arch]) > 1 else {}
        table.add_row(escape(name), arch, ", ".join(same), *cells)
    if rows:
        console.print(table)


def show_comparison(comparison: Comparison, baseline: str, console: Console) -> None:
    """What got worse, what fails the comparison first, then what was not compared."""

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    if comparison.compared or comparison.worse:
        verdict = f"{len(comparison.worse)} got worse" if comparison.worse else "nothing got worse"
        say(f"against {baseline}: {comparison.compared} compared, {verdict}")
    else:
        say(f"against {baseline}: nothing was compared")
    if comparison.worse:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for heading in ("", "kernel", "config and case", "what"):
            table.add_column(heading, overflow="fold")
        for heading in ("before", "now"):
            table.add_column(heading, justify="right")
        for change in comparison.worse:
            verdict = "[red]fails[/]" if change.fails else "within limits"
            names = escape(f"{change.kernel} {change.arch}"), escape(f"{change.config}; {change.case}")
            before = "new" if change.before is None else f"{change.before:,}"
            table.add_row(verdict, *names, change.what, before, f"{change.now:,}")
        console.print(table)
    for line in comparison.notes:
        say(f"note: {line}")
