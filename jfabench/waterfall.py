"""What each stage of a kernel costs: the kernel of a case, and variants that each leave one stage out, timed in turns.

A variant's results are wrong by design. Its times are no speed of anything, and no speedup is derived from them: they
stand in `waterfall.csv` alone, which no table of results reads. What a variant saves is what the rest of the kernel
does not hide. Only the kernel itself is timed, with the arguments of the provider's own launch: no list of tiles, no
`delta`.
"""

from __future__ import annotations

import csv
import hashlib
import io
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from jfabench.folder import write_whole
from jfabench.intervals import Rounds, median_interval, paired_ratio
from jfabench.operator import load_operator, load_providers
from jfabench.records import Case

if TYPE_CHECKING:
    from jfabench.kernels.attention.switches_sm90 import Switch

PROVIDER = "tlx_jfa"
SHIPPED = "as shipped"
WRONG = "wrong by design"
COLUMNS = (
    *("operator", "provider", "direction", "seed", "shape", "label", "gpu", "kernel", "config"),
    *("variant", "results", "text", "median_s", "low_s", "high_s", "saved_s", "saved", "saved_low", "saved_high"),
    *("rounds", "note"),
)
"""Columns of `waterfall.csv`. `saved` is the share of the shipped kernel's time that a variant saves, with its 95%
interval from the ratios of the rounds; `results` says whether a row's results are right."""

CALLS = 3  # of a variant in a round
HANGS = 20.0  # seconds after which a launch counts as hanging

Row = dict[str, str]


class WaterfallError(RuntimeError):
    """Nothing can be measured here; the message says why and what to do."""


@dataclass(frozen=True)
class Launch:
    """A launch that a provider made: everything to make it again."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: Mapping[str, Any]

    def without(self, switch: Switch) -> Launch:
        """The same, without a stage."""
        names = self.kernel.arg_names
        args = tuple(None if name in switch.unused else value for name, value in zip(names, self.args, strict=False))
        return replace(self, kernel=switch.made(), args=args, options={**self.options, **switch.options})

    def __call__(self) -> None:
        self.kernel[self.grid](*self.args, **self.options)

    @property
    def config(self) -> str:
        """What the kernel was compiled for."""
        known = {name: value for name, value in self.options.items() if name in self.kernel.arg_names}
        return " ".join(f"{name.lower()}={value}" for name, value in known.items())


def obstacle(device: str) -> str | None:
    """Why there is no waterfall on `device`, and the remedy; None if there is one."""
    import torch

    from jfabench.kernels.attention.launch import tlx_obstacle

    found = tlx_obstacle(torch.device(device))
    if found is not None:
        return f"a waterfall times variants of the TLX kernels: {found.reason}; run it on an H100 or H200 with fbtriton"
    return None


def waterfall(
    cases: Iterable[Case], device: str, target: Path, rounds: int, say: Callable[[str], None] = print
) -> list[Row]:
    """Measures every case, and writes `target` anew after each. Raises `WaterfallError`, and `OSError` for the file."""
    rows: list[Row] = []
    for case in cases:
        launch = captured(case, device)
        variants = _variants(launch)
        samples, notes = _measured(variants, rounds)
        rows += tabled(case, launch, samples, _gpu(device), notes)
        write_rows(target, rows)
        for row in rows[-len(samples) :]:
            saved = f"{float(row['saved']):+.1%} saved" if row["saved"] else ""
            say(f"{row['direction']} {row['label']}: {row['variant']} {float(row['median_s']) * 1e6:.1f} us {saved}")
    return rows


def captured(case: Case, device: str) -> Launch:
    """The launch of the attention kernel that the provider makes for `case`, after it has made it once."""
    from jfabench.kernels.attention import launch_sm90
    from jfabench.kernels.attention.switches_sm90 import MODULES

    operator = load_operator(case.operator)
    params = operator.parse(case.params)
    provider = load_providers(case.operator).by_name[PROVIDER]
    reason = provider.unsupported(params, case.direction)
    if reason:
        raise WaterfallError(f"{PROVIDER} has no {case.direction} for {operator.label(params)}: {reason}")
    found: list[Launch] = []
    launcher: Any = launch_sm90
    run_kernel = launcher.run_kernel

    def record(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        if kernel.__name__ in MODULES and 0 not in grid:
            found.append(Launch(kernel, grid, args, options))
        run_kernel(kernel, grid, *args, **options)

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(launcher, "run_kernel", record))
        call = provider.prepare(operator.make_inputs(params, case.seed, device), case.direction)
        found.clear()  # what `prepare` ran is of the other direction
        call.run()
    if not found:
        raise WaterfallError(
            f"{PROVIDER} launches no kernel that has variants for {operator.label(params)}: choose another case"
        )
    return found[-1]


def _variants(launch: Launch) -> dict[str, tuple[Launch, str]]:
    """The launch itself and those without a stage, by name, each with what is done instead."""
    from jfabench.kernels.attention.switches_sm90 import SWITCHES

    variants = {SHIPPED: (launch, "")}
    for switch in SWITCHES:
        if switch.kernel == launch.kernel.__name__ and switch.serves(launch.options):
            variants[switch.name] = launch.without(switch), switch.text
    return variants


def _measured(
    variants: Mapping[str, tuple[Launch, str]], rounds: int
) -> tuple[dict[str, list[list[float]]], dict[str, str]]:
    """Seconds of each variant by round, in turns, in an order drawn anew for each; and what each does instead."""
    from jfabench.kernels.attention.tune import gpu_timer

    for name, (launch, _) in variants.items():  # compiles
        launch()
        _require_end(name)
    seconds_of = gpu_timer()
    samples: dict[str, list[list[float]]] = {name: [] for name in variants}
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(variants), len(variants)):
            launch = variants[name][0]
            seconds_of(launch)  # whatever ran before has left its clocks behind
            samples[name].append([seconds_of(launch) for _ in range(CALLS)])
    return samples, {name: text for name, (_, text) in variants.items()}


def _require_end(name: str) -> None:
    import torch

    cuda: Any = torch.cuda  # parts of it are untyped
    event = cuda.Event()
    event.record()
    deadline = time.monotonic() + HANGS
    while not event.query():
        if time.monotonic() > deadline:
            raise WaterfallError(
                f"the variant {name!r} does not end: the GPU hangs until this process ends; what was measured is kept"
            )
        time.sleep(0.001)


def _gpu(device: str) -> str:
    import torch

    return str(torch.cuda.get_device_name(torch.device(device)))


# The table -----------------------------------------------------------------------------------------------------------


def tabled(case: Case, launch: Launch, samples: Mapping[str, Rounds], gpu: str, texts: Mapping[str, str]) -> list[Row]:
    """A row for the shipped kernel, which is the first of `samples`, and one for each variant."""
    operator = load_operator(case.operator)
    facts = {
        "operator": case.operator,
        "provider": case.provider,
        "direction": case.direction,
        "seed": case.seed,
        "shape": hashlib.sha256(case.shape_key.encode()).hexdigest()[:10],  # as in results.csv
        "label": operator.label(operator.parse(case.params)),
        "gpu": gpu,
        "kernel": launch.kernel.__name__,
        "config": launch.config,
    }
    base = next(iter(samples.values()))
    shipped = median_interval(base).middle
    rows = []
    for name, rounds in samples.items():
        time_of = median_interval(rounds)
        values: dict[str, Any] = {
            **facts,
            "variant": name,
            "results": SHIPPED if rounds is base else WRONG,
            "text": texts[name],
            **{f"{which}_s": value for which, value in zip(("median", "low", "high"), time_of, strict=True)},
            "rounds": len(rounds),
            "note": "" if rounds is base else "for diagnosis: no speedup",
        }
        if rounds is not base:
            ratio = paired_ratio(base, rounds)  # how many times faster: the share saved is 1 - 1 / ratio
            values |= {
                "saved_s": shipped - time_of.middle,
                "saved": 1 - 1 / ratio.middle,
                "saved_low": 1 - 1 / ratio.low,
                "saved_high": 1 - 1 / ratio.high,
            }
        rows.append({column: _text(values.get(column)) for column in COLUMNS})
    return rows


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_whole(path, text.getvalue().encode())
