"""What each idea in the Hopper kernels is worth: a base configuration against one change at a time.

    python scripts/ablation.py [--rounds 15] [--csv ablation.csv]

Needs a GPU of sm_90. Prints a Markdown table for each direction: TFLOP/s of useful work, from the median time of calls
that are timed in turns by CUDA events with a cold L2 cache, and the difference from the base. A time includes all that
a call launches, also the schedule, except where the table says so. Bold: what serves the shape untuned.

The schedules: `none` deals the tiles out in the order of the batch, `sorted` heaviest first, `zigzag` (the base) every
other round backwards; `LPT` gives a multiprocessor that is free the heaviest tile that is left, which the hardware does
where each tile is a program of its own, which then has no queries to keep.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import functools
import multiprocessing
import os
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import numpy as np
import torch
import triton
from torch import Tensor

from jfabench.kernels.attention import config_sm90 as configs
from jfabench.kernels.attention import launch_sm90
from jfabench.kernels.attention.hardware import shared_memory_limit
from jfabench.kernels.attention.problem import Problem, make_problem
from jfabench.kernels.attention.tiles import ENTRY, Sequences, TileList, build_tiles
from jfabench.kernels.attention.tune import gpu_timer
from jfabench.operators.lengths import ConstantLengths, FillLengths, Lengths

HEADS, HEAD_DIM = 4, 128
UNBOUNDED = (-1, -1)


@dataclass(frozen=True, eq=False)
class Shape:
    """``M`` queries shared by all sequences, or None for as many queries as keys."""

    name: str
    M: int | None
    lengths: Lengths

    @property
    def forward_flops(self) -> float:
        keys = self.lengths.astype(float)
        return float(4 * HEAD_DIM * HEADS * (keys * (keys if self.M is None else self.M)).sum())

    def problem(self) -> Problem:
        k_offsets = torch.from_numpy(np.concatenate([[0], self.lengths.cumsum()])).int().cuda()
        keys = int(self.lengths.sum())
        q, k, v = (normal(rows) for rows in (self.M or keys, keys, keys))
        q_offsets = None if self.M else k_offsets
        return make_problem(q, k, v, k_offsets, q_offsets, HEAD_DIM**-0.5, UNBOUNDED, False)


def normal(rows: int) -> Tensor:
    return torch.randn(rows, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)


def shapes(batch: int = 768) -> list[Shape]:
    def fill(max_len: int, fill: float) -> Shape:
        lengths = FillLengths(kind="fill", max_len=max_len, fill=fill, empty=0).draw(batch, np.random.default_rng(0))
        return Shape(f"jagged N={max_len} fill={fill:g}", 256, lengths)

    dense = ConstantLengths(kind="constant", length=1024, empty=0).draw(batch, np.random.default_rng(0))
    return [fill(512, 0.1), fill(1024, 0.5), fill(4096, 0.5), Shape("dense N=1024", None, dense)]


# Variants -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """A configuration of the kernel of one direction, and what else a call does differently."""

    direction: Literal["forward", "backward"]
    name: str
    config: Any
    schedule: Callable[..., TileList] | None = None  # `build_tiles` or alike: makes the list ahead, once for a shape
    build: bool = True  # whether a call builds a list, be it that another one is used
    programs: int | None = None  # in place of as many as are resident at once
    queries_stay: bool = True  # in shared memory, where they can

    @property
    def plain(self) -> bool:
        """Whether its configuration is all that makes it."""
        return self.schedule is None and self.programs is None and self.queries_stay

    def prepared(self, sequences: Sequences) -> TileList | None:
        if self.schedule is None:
            return None
        over_keys = self.direction == "backward"
        block = configs.TILE_KEYS if over_keys else self.config.block_m
        return self.schedule(sequences, block, over_keys=over_keys)


@contextlib.contextmanager
def installed(variant: Variant, prepared: TileList | None) -> Iterator[None]:
    """Makes the launch code follow `variant`."""

    def tiles(sequences: Sequences, block: int, *, over_keys: bool = False) -> TileList:
        built = build_tiles(sequences, block, over_keys=over_keys) if variant.build or prepared is None else prepared
        return prepared or built

    with contextlib.ExitStack() as patches:

        def patch(name: str, value: Any) -> None:
            patches.enter_context(mock.patch.object(launch_sm90, name, value))

        patch("_choose", lambda *_: variant.config)
        patch("build_tiles", tiles)
        if variant.programs is not None:
            patch("multiprocessors", lambda _: variant.programs)
        if not variant.queries_stay:
            patch("queries_stay", lambda *_: False)
        yield


def unsorted_tiles(sequences: Sequences, block: int, *, over_keys: bool = False) -> TileList:
    """The tiles of queries (or keys) in the order of the batch."""
    k_ends = sequences.k_offsets.long().cpu()
    k_start, k_len = k_ends[:-1], k_ends.diff()
    if sequences.q_offsets is None:
        q_start, q_len = torch.zeros_like(k_len), torch.full_like(k_len, sequences.M)
        out_start = torch.arange(sequences.batch) * sequences.M
    else:
        q_ends = sequences.q_offsets.long().cpu()
        out_start = q_start = q_ends[:-1]
        q_len = q_ends.diff()
    counts = ((k_len if over_keys else q_len) + block - 1) // block
    of = torch.repeat_interleave(counts)
    number = torch.arange(len(of)) - (counts.cumsum(0) - counts)[of]
    entries = torch.zeros(1 + len(of), ENTRY.value, dtype=torch.int32)
    entries[0, 0] = len(of)
    columns = (number, q_start[of], q_len[of], k_start[of], k_len[of], out_start[of])
    entries[1:, : len(columns)] = torch.stack(columns, dim=1).int()
    return TileList(entries.to(sequences.k_offsets.device), len(of))


def forward_variants() -> list[Variant]:
    base = configs.ForwardConfig()
    changed = [
        replace(base, pingpong=False),
        replace(base, late=False),
        replace(base, lazy=False),
        replace(base, late=False, lazy=False),
        replace(base, peel=False),
        replace(base, block_n=64),
        replace(base, block_n=64, kv_stages=4),
        *(config for config in configs.CANDIDATES["forward"] if config != base),
    ]
    dealt = replace(base, zigzag=False)
    forward = functools.partial(Variant, "forward")
    return [
        forward("base: zigzag schedule", base),
        forward("schedule built before the call", base, build_tiles, build=False),
        forward("schedule none", dealt, unsorted_tiles),
        forward("schedule sorted", dealt),
        forward("schedule LPT, a program a tile", dealt, programs=2**31),
        forward("queries loaded for each tile", base, queries_stay=False),
        *(forward(difference(base, config), config) for config in dict.fromkeys(changed)),
    ]


def backward_variants() -> list[Variant]:
    base = configs.BackwardConfig()
    changed = [replace(base, late_dq=False), replace(base, add_dq=False), replace(base, stages=base.stages + 1)]
    backward = functools.partial(Variant, "backward")
    return [
        backward("base: zigzag schedule", base),
        backward("schedule built before the call", base, build_tiles, build=False),
        backward("schedule none", base, unsorted_tiles),
        backward("schedule LPT, a program a tile", base, programs=2**31),
        *(backward(difference(base, config), config) for config in changed),
    ]


def difference(base: Any, config: Any) -> str:
    return ", ".join(f"{name}={value}" for name, value in vars(config).items() if value != getattr(base, name))


# Measurement ----------------------------------------------------------------------------------------------------------

Call = Callable[[], Sequence[Tensor | None]]


def call_of(direction: str, problem: Problem) -> Call:
    if direction == "forward":
        return lambda: launch_sm90.forward(problem)
    with installed(forward_variants()[0], None):
        out, lse = launch_sm90.forward(problem)
    dout = normal(problem.sequences.rows)
    return lambda: launch_sm90.backward(problem, out, lse, dout, need_dq=True, need_dkdv=True)


def compile_ahead(variant: Variant) -> None:
    """Leaves in Triton's cache what the calls of `variant` need: for shared and for packed queries."""
    if not configs.fits(variant.direction, variant.config, HEAD_DIM, shared_memory_limit(torch.device("cuda", 0))):
        return
    for shape in (shapes(batch=2)[0], shapes(batch=2)[-1]):
        call = call_of(variant.direction, shape.problem())
        # As many tiles a program as in a full batch, so that queries stay.
        few = variant if variant.programs else replace(variant, programs=HEADS)
        with installed(few, None):
            call()


def median_seconds(problem: Problem, variants: list[Variant], rounds: int) -> dict[Variant, float]:
    calls = {direction: call_of(direction, problem) for direction in ("forward", "backward")}
    lists = {variant: variant.prepared(problem.sequences) for variant in variants}
    right: dict[str, Sequence[Tensor | None]] = {}
    for variant in variants:  # must compute the same as the first
        with installed(variant, lists[variant]):
            results = calls[variant.direction]()
        expected = right.setdefault(variant.direction, results)
        torch.testing.assert_close(results, expected, rtol=2e-2, atol=2e-2, msg=f"other numbers with {variant.name}")
    del results, right, expected
    seconds_of = gpu_timer()
    cuda: Any = torch.cuda  # parts of it are untyped
    samples: dict[Variant, list[float]] = {variant: [] for variant in variants}
    order = random.Random(0)
    for _ in range(rounds):
        for variant in order.sample(variants, len(variants)):
            with installed(variant, lists[variant]):
                cuda._sleep(1_000_000)  # with the timer's own, a millisecond for the host to get ahead
                samples[variant].append(seconds_of(calls[variant.direction]))
    return {variant: statistics.median(values) for variant, values in samples.items()}


@dataclass(frozen=True)
class Column:
    """What was found for a shape: medians, and the configuration that serves each direction."""

    shape: Shape
    seconds: dict[Variant, float]
    shipped: dict[str, Any]

    def cell(self, variant: Variant, base: Variant) -> str:
        if variant not in self.seconds:
            return "does not fit"
        speed = flops(self.shape, variant) / self.seconds[variant] * 1e-12
        text = f"{speed:.0f}"
        if variant != base:
            text += f" ({self.seconds[base] / self.seconds[variant] - 1:+.1%})"
        return f"**{text}**" if variant.plain and variant.config == self.shipped[variant.direction] else text


def measured(shape: Shape, variants: list[Variant], rounds: int) -> Column:
    problem = shape.problem()
    limit = shared_memory_limit(problem.q.device)
    usable = [v for v in variants if configs.fits(v.direction, v.config, HEAD_DIM, limit)]
    shipped = {name: configs.candidates(problem.kind("sm90", name), limit)[0] for name in ("forward", "backward")}
    return Column(shape, median_seconds(problem, usable, rounds), shipped)


def table(variants: list[Variant], columns: list[Column]) -> str:
    """TFLOP/s, and the difference from the first variant."""
    base = variants[0]
    rows = [[base.direction, *(column.shape.name for column in columns)], ["---", *("---:" for _ in columns)]]
    rows += [[variant.name, *(column.cell(variant, base) for column in columns)] for variant in variants]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def write_csv(path: Path, columns: list[Column]) -> None:
    """A row for each variant that was timed and each shape."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("direction", "variant", "config", "shape", "median_s", "tflops", "serves_untuned"))
        for column in columns:
            for variant, seconds in column.seconds.items():
                speed = flops(column.shape, variant) / seconds * 1e-12
                serves = variant.plain and variant.config == column.shipped[variant.direction]
                words = (variant.direction, variant.name, variant.config, column.shape.name)
                writer.writerow((*words, f"{seconds:.6g}", f"{speed:.5g}", serves))


def flops(shape: Shape, variant: Variant) -> float:
    return shape.forward_flops * (1 if variant.direction == "forward" else 2.5)


def main() -> None:
    parser = argparse.ArgumentParser(description="What each idea in the Hopper kernels is worth.")
    parser.add_argument("--rounds", type=int, default=15, help="calls of each variant (default: %(default)s)")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the times there, too")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        sys.exit("The ablation is about the kernels for Hopper: run it on a GPU of sm_90.")
    os.environ["JFABENCH_TUNE"] = "0"  # where a variant names no configuration, the default serves
    groups = [forward_variants(), backward_variants()]
    variants = [variant for group in groups for variant in group]
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_ahead, {variant.config: variant for variant in variants}.values()))
    columns = [measured(shape, variants, arguments.rounds) for shape in shapes()]
    if arguments.csv:
        write_csv(arguments.csv, columns)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}. ", end="")
    print(f"TFLOP/s, H={HEADS}, D={HEAD_DIM}, B={len(columns[0].shape.lengths)}, bf16; jagged: M={columns[0].shape.M}.")
    for group in groups:
        print(f"\nBase: `{group[0].config}`\n\n{table(group, columns)}")


if __name__ == "__main__":
    main()
