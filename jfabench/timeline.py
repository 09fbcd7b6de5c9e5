"""Timelines: calls of a provider whose kernels note from inside when each tile ran where, and what they waited for.

Only the TLX kernels for Hopper can be recorded. A case is computed without recording first, so that what is compiled or
chosen at a first call is not in the picture. The recorded call finds the L2 cache flushed, as timed calls do, and its
results are checked against the operator's oracle. What recording costs is measured: calls with and without it, in
turns. It includes the filling of the buffer with zeros.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from jfabench.folder import write_whole
from jfabench.operator import Call, load_operator, load_providers
from jfabench.policy import MeasurePolicy
from jfabench.records import Case

if TYPE_CHECKING:
    import pandas as pd

    from jfabench.kernels.attention.record import Recording

ORDERS = {
    "sorted": "heaviest tiles first",
    "batch": "in the order of the batch",
}
"""In which order the programs are dealt tiles: as the kernels do it, or without balancing the load."""

POLICY = MeasurePolicy(rounds=4, min_iterations=40, max_seconds=0.2, warmup_seconds=0.1)  # type: ignore[call-arg]
"""For what recording costs."""


class TimelineError(RuntimeError):
    """Nothing can be recorded here, or what was recorded is not right; the message says why and what to do."""


def obstacle(device: str) -> str | None:
    """Why nothing can be recorded on `device`, and the remedy; None if it can."""
    import torch

    from jfabench.kernels.attention.launch import tlx_obstacle

    found = tlx_obstacle(torch.device(device))
    if found is not None:
        return f"only the TLX kernels record a timeline: {found.reason}; run it on an H100 or H200 with fbtriton"
    return None


@dataclass
class Tables:
    """What was recorded so far: `jfabench.reports.timeline` describes the two tables."""

    runs: list[dict[str, Any]] = field(default_factory=list)
    spans: list[pd.DataFrame] = field(default_factory=list)

    def write(self, folder: Path) -> None:
        import pandas as pd

        from jfabench.reports.timeline import RUNS, SPANS

        write_whole(folder / SPANS, pd.concat(self.spans).to_csv(index=False, float_format="%.9f").encode())
        write_whole(folder / RUNS, pd.DataFrame(self.runs).to_csv(index=False, float_format="%.9g").encode())


def record(cases: Sequence[Case], device: str, orders: Sequence[str], folder: Path) -> Iterator[str]:
    """Records every case with every order of tiles. Writes the folder anew, pictures too, and says so, after each case.

    Raises `TimelineError`, and `OSError` for the folder.
    """
    from jfabench.reports import timeline as report

    _select(device)
    tables = Tables()
    for case in cases:
        for run, spans in _recorded(case, device, orders):
            number = len(tables.runs)
            tables.runs.append({"run": number, **run})
            tables.spans.append(spans.assign(run=number)[["run", *spans.columns]])
        tables.write(folder)
        report.build(folder)
        table = report.waits(report.Timeline.read(folder))
        for run in tables.runs:
            if (run["shape"], run["direction"]) == (case.shape_key, case.direction):
                yield sentence(run, report.bottleneck(table[table["run"] == run["run"]]))


def sentence(run: Mapping[str, Any], bottleneck: str) -> str:
    return (
        f"{run['label']}, {run['kernel']}, {run['order_text']}: {run['makespan_s'] * 1e6:.0f} us inside the kernel, "
        f"busiest multiprocessor {run['imbalance']:.3f} of the mean (tiles' costs predict "
        f"{run['predicted_imbalance']:.3f}); {bottleneck}; recording takes {run['recorded_s'] * 1e6:.0f} us a call "
        f"instead of {run['unrecorded_s'] * 1e6:.0f}"
    )


# One case ------------------------------------------------------------------------------------------------------------


def _recorded(case: Case, device: str, orders: Sequence[str]) -> Iterator[tuple[dict[str, Any], pd.DataFrame]]:
    """The facts and the spans of each recorded launch of a case."""
    operator = load_operator(case.operator)
    params = operator.parse(case.params)
    provider = load_providers(case.operator).by_name[case.provider]
    label = operator.label(params)
    if reason := provider.unavailable(device.split(":")[0]) or provider.unsupported(params, case.direction):
        raise TimelineError(f"{case.provider} cannot compute {case.direction} of {label}: {reason}")
    inputs = operator.make_inputs(params, case.seed, device)
    expected = operator.oracle(inputs, (case.direction,))
    call = provider.prepare(inputs, case.direction)
    call.run()
    for order in orders:
        with _tiles_in(order):
            recordings, results = _run_recorded(call, device)
            checks = operator.check(results, expected, case.direction)
            wrong = [check.tensor for check in checks if not check.passed]
            if wrong or not checks:
                raise TimelineError(
                    f"{label}, {case.direction}, {order}: {', '.join(wrong) or 'the results'} recorded wrong: "
                    "the recording build of the kernel is broken; report it with this case"
                )
            seconds = _cost_of_recording(call, device)
        del results
        if not recordings:
            raise TimelineError(
                f"{case.provider} launches no kernel that can be recorded; only tlx_jfa does, with --only tlx_jfa"
            )
        for recording in recordings:
            spans = table_of(recording)
            yield (
                {
                    "label": label,
                    "direction": case.direction,
                    "kernel": recording.direction,
                    "order": order,
                    **facts(spans, _multiprocessors(device)),
                    **seconds,
                    **_machine(device),
                    **{name: getattr(case, name) for name in ("operator", "provider", "seed")},
                    "shape": case.shape_key,
                    "order_text": ORDERS[order],
                    "when": datetime.now(UTC).isoformat(timespec="seconds"),
                },
                spans,
            )


def _run_recorded(call: Call, device: str) -> tuple[list[Recording], Mapping[str, Any]]:
    """What a call records, each kernel once, and its results. A call before it has compiled what records."""
    from jfabench.kernels.attention.record import recording

    with recording():
        call.run()
    _flush(device)
    with recording() as found:
        raw = call.run()
    _synchronize(device)
    return list({each.direction: each for each in found}.values()), call.results(raw)


def _cost_of_recording(call: Call, device: str) -> dict[str, float]:
    """Median seconds of a call without and with recording; NaN where they could not be measured."""
    from jfabench.kernels.attention.record import recording
    from jfabench.measure import make_sampler, measure_interleaved
    from jfabench.records import Measurement

    def recorded() -> None:
        with recording():
            call.run()

    kind = device.split(":")[0]
    sampler = make_sampler(POLICY.mode_on(kind), kind)
    outcomes = measure_interleaved({"unrecorded_s": call.run, "recorded_s": recorded}, sampler, POLICY)
    return {
        name: statistics.median(sample for samples in outcome.rounds for sample in samples)
        if isinstance(outcome, Measurement)
        else float("nan")
        for name, outcome in sorted(outcomes.items(), reverse=True)
    }


@contextlib.contextmanager
def _tiles_in(order: str) -> Iterator[None]:
    """Launches inside, all of one case, walk over their tiles in this order; the list is put into it once."""
    from jfabench.kernels.attention import launch_sm90

    if order == "sorted":
        yield
        return
    launch: Any = launch_sm90
    build_tiles = launch.build_tiles
    ordered: dict[Any, Any] = {}

    def unsorted(sequences: Any, block: int, **options: Any) -> Any:
        built = build_tiles(sequences, block, **options)  # in any case: it is part of what a call takes
        kind = (block, *options.items())
        if kind not in ordered:
            ordered[kind] = in_batch_order(built)
        return ordered[kind]

    with mock.patch.object(launch, "build_tiles", unsorted):
        yield


def in_batch_order(tiles: Any) -> Any:
    """The list of tiles in the order of the sequences and their blocks. Sorts on the device, without waiting for it."""
    import torch

    from jfabench.kernels.attention.tiles import TileList

    header, entries = tiles.entries[:1], tiles.entries[1:]
    block, k_start, out_start = (entries[:, column].long() for column in (0, 3, 5))
    filled = torch.arange(len(entries), device=entries.device) < header[0, 0]
    order = torch.arange(len(entries), device=entries.device)
    for key in (block, out_start, k_start, ~filled):  # the last key counts most
        order = order[torch.sort(key[order].long(), stable=True).indices]
    return TileList(torch.cat([header, entries[order]]), tiles.most)


# Tables --------------------------------------------------------------------------------------------------------------


def table_of(recording: Recording) -> pd.DataFrame:
    """The spans of a launch, as `jfabench.reports.timeline` wants them. Raises `TimelineError`."""
    import pandas as pd

    from jfabench.kernels.attention.record import ROLES

    try:
        rows = recording.rows()
    except ValueError as error:
        raise TimelineError(f"{recording.direction} kernel: {error}") from error
    table = pd.DataFrame(rows)
    table["role"] = [ROLES[role] for role in rows["role"]]
    table[["begin", "end"]] *= 1e-9
    table = table.rename(columns={"begin": "start_s", "end": "end_s"})
    table["rows"] = table["k_len"] if recording.direction == "forward" else table["q_len"]
    return table


def facts(spans: pd.DataFrame, sms: int) -> dict[str, Any]:
    """What is said of a run as a whole: its balance, and how long it should take by other ways of dealing tiles."""
    import numpy as np

    from jfabench.reports.timeline import balance

    found = balance(spans)
    ends = np.unique(spans["end_s"])
    return {
        "sms": sms,
        "programs": spans["program"].nunique(),
        "tiles": len(spans) // max(spans["role"].nunique(), 1),
        "clock_hz": spans["cycles"].sum() / max((spans["end_s"] - spans["start_s"]).sum(), 1e-9),
        "timer_step_s": float(np.diff(ends).min()) if len(ends) > 1 else float("nan"),
        **asdict(found),
        **policies(spans, found.fixed_s, found.per_row_s, sms),
    }


def policies(spans: pd.DataFrame, fixed_s: float, per_row_s: float, sms: int) -> dict[str, float]:
    """`policy_<name>_s`: the makespan that each policy of `jfabench.schedule` makes of the recorded tiles."""
    import numpy as np

    from jfabench import schedule

    first = spans[spans["role"] == spans["role"].iloc[0]]
    listed = first.sort_values(["k_start", "out_start", "block", "head"], kind="stable")
    sequence = listed.groupby(["k_start", "out_start"], sort=True).ngroup().to_numpy()
    work = schedule.Tiles(sequence, listed["head"].to_numpy(), listed["block"].to_numpy(), listed["rows"].to_numpy())
    cost = fixed_s + per_row_s * listed["rows"].to_numpy(float)
    weight = np.zeros(int(sequence.max()) + 1, np.int64)
    weight[sequence] = listed["rows"].to_numpy()
    residents = -(-int(spans["program"].nunique()) // sms)
    placed = schedule.compared(work, cost, weight, schedule.POLICIES, sms, residents)
    return {f"policy_{each.policy}_s": each.makespan for each in placed}


def _select(device: str) -> None:
    import torch

    torch.cuda.set_device(torch.device(device).index or 0)


def _flush(device: str) -> None:
    """Leaves nothing of the call before in the L2 cache."""
    import torch

    torch.empty(2**28, dtype=torch.int8, device=device).zero_()


def _synchronize(device: str) -> None:
    import torch

    torch.cuda.synchronize(device)


def _machine(device: str) -> dict[str, Any]:
    import torch

    return {"gpu": torch.cuda.get_device_name(torch.device(device))}


def _multiprocessors(device: str) -> int:
    import torch

    from jfabench.kernels.attention.hardware import multiprocessors

    return multiprocessors(torch.device(device))
