"""Compares two builds case by case: measured in turns here and now, or from result folders that exist.

`from_folders` and `from_blocks` need no GPU and no torch; `measured` runs both builds (see `jfabench.interleaved`). The
statistics are those of `jfabench.regression`.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jfabench import env as environments
from jfabench import interleaved, regression
from jfabench.counted import read_folder
from jfabench.folder import ResultFolder, write_json
from jfabench.interleaved import SIDES, Plan
from jfabench.intervals import Interval
from jfabench.records import Case, Record
from jfabench.regression import Blocks, CaseResult, Comparison, Noise

Block = Mapping[Case, Record]
"""The records of one process, by case."""

PAIRS, REPEATED_PAIRS = 4, 8
"""Pairs of processes for all cases, and for those that the first ones made suspicious."""

_COUNTER_CHANGE = 0.02
_ERROR_CHANGE = 1.5
_MOST_REASONS = 4


class CompareError(ValueError):
    """Two things that cannot be compared; the message says why and what to do."""


# Blocks on disk ------------------------------------------------------------------------------------------------------


def is_results(path: Path) -> bool:
    """Whether `path` is a result folder, or holds some (one for each process)."""
    return bool(_folders(path))


def read_side(path: Path) -> list[Block]:
    """The blocks of one build: of a result folder, or of each one below `path`, in the order of their names.

    Raises `CompareError` where there is none, or one is damaged or of a newer schema.
    """
    folders = _folders(path)
    if not folders:
        raise CompareError(f"{path}: no records.jsonl here or in its folders; name what `sweep` or `compare` wrote")
    blocks: list[Block] = []
    for folder in folders:
        try:
            blocks.append({record.case: record for record in read_folder(folder)})
        except ValueError as error:
            raise CompareError(str(error)) from None
    return blocks


def _folders(path: Path) -> list[ResultFolder]:
    below = (ResultFolder(found) for found in sorted(path.glob("*/")))
    own = ResultFolder(path)
    return [own] if own.stored.is_file() else [folder for folder in below if folder.stored.is_file()]


# Comparisons ---------------------------------------------------------------------------------------------------------


def from_folders(a: Path, b: Path) -> Comparison:
    """Compares what two folders hold.

    Blocks count as measured in turns where both sides were written so (`pair-00`, `pair-01`, ... beside each other).
    Raises `CompareError`.
    """
    names = [[folder.root.name for folder in _folders(path)] for path in (a, b)]
    paired = names[0] == names[1] and a.parent == b.parent and all(name.startswith("pair-") for name in names[0])
    first = read_side(a), read_side(b)
    again_folders = [path.parent / "repeated" / path.name for path in (a, b)]
    again = tuple(map(read_side, again_folders)) if paired and all(map(is_results, again_folders)) else None
    labels = (str(a), str(b))
    return from_blocks(labels, first, paired=paired, repeated=(again[0], again[1]) if again else None)


def measured(
    plan: Plan,
    root: Path,
    *,
    repeated_pairs: int = REPEATED_PAIRS,
    floor: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> Comparison:
    """Measures both builds in turns, then what is suspicious again, in fresh processes, and compares.

    The records are below `root` afterwards: `a/`, `b/`, and `repeated/a/`, `repeated/b/`. With `floor`, the noise floor
    that was measured on this machine raises what counts as a change. Raises `CompareError` and
    `jfabench.workers.SweepStoppedError`.
    """
    labels = (plan.trees[0].label, plan.trees[1].label)
    if any(map(is_results, (root / side for side in SIDES))):
        raise CompareError(f"{root}: holds a comparison already; choose another --out")
    interleaved.measure(plan, root, say)
    first = read_side(root / "a"), read_side(root / "b")
    found = from_blocks(labels, first, paired=True, floor=floor)
    again = tuple(
        result.case
        for result in found.cases
        if repeated_pairs and regression.is_suspicious(result.estimate.shown.middle, found.limit)
    )
    if not again:
        return found if repeated_pairs == 0 else from_blocks(labels, first, paired=True, repeated=([], []), floor=floor)
    say(f"{len(again)} of {len(found.cases)} cases are measured again")
    interleaved.measure(replace(plan, cases=again, pairs=repeated_pairs), root / "repeated", say)
    repeated = read_side(root / "repeated" / "a"), read_side(root / "repeated" / "b")
    return from_blocks(labels, first, paired=True, repeated=repeated, floor=floor)


def from_blocks(
    labels: tuple[str, str],
    blocks: tuple[Sequence[Block], Sequence[Block]],
    *,
    paired: bool,
    repeated: tuple[Sequence[Block], Sequence[Block]] | None = None,
    floor: bool = True,
) -> Comparison:
    """Compares blocks that were read. `repeated` are those of a second stage, which then decides (may be empty).

    Raises `CompareError` where the two sides are of different devices, or have no case in common.
    """
    records = [[record for block in side for record in block.values()] for side in blocks]
    machine, notes = _machine(records)
    env = next((dict(record.env) for side in records for record in side if record.env), {})
    noise = load_noise(env)
    limit = regression.threshold(noise.floor if noise and floor else None)
    cases = list(dict.fromkeys(record.case for side in records for record in side))
    if not {record.case for record in records[0]} & {record.case for record in records[1]}:
        raise CompareError(f"{labels[0]} and {labels[1]} have no case in common")
    again = {record.case for side in repeated or () for block in side for record in block.values()}
    known = [case for case in cases if case not in again]
    stage = "only" if repeated is None else "first"
    results = {case: _result(case, blocks, paired, len(known), noise, limit, stage) for case in known}
    for case in again:
        assert repeated is not None
        results[case] = _result(case, repeated, True, len(again), noise, limit, "repeated")
    ordered = [results[case] for case in cases if case in results]
    if any(result.blocks.a and result.blocks.b and math.isnan(result.estimate.shown.low) for result in ordered):
        notes.append(
            "One process of each build tells nothing about chance. Measure both in turns (name two revisions, not "
            "folders), or the noise of this machine once: python -m jfabench compare --aa --config jagged.yaml"
        )
    means = _means(cases, blocks, paired, noise)
    # That what was wrong is right tells something, too.
    tells = any((result.blocks.a and result.blocks.b) or result.status == ("wrong", "ok") for result in ordered)
    why = "" if tells else _why_unmeasured(ordered, blocks)
    return Comparison(labels, machine, tuple(ordered), means, limit, noise, tuple(notes), why)


def _why_unmeasured(results: Sequence[CaseResult], blocks: tuple[Sequence[Block], Sequence[Block]]) -> str:
    """The sentence for a comparison without a time on both sides of any case: reasons with their numbers of cases."""
    reasons: Counter[str] = Counter()
    for result in results:
        found = [record for side in blocks for block in side if (record := block.get(result.case))]
        bad = next((record for record in found if record.status != "ok"), None)
        if bad is not None:
            reasons[f"{bad.status}: {' '.join(bad.reason.split())}" if bad.reason else bad.status] += 1
        elif "missing" in result.status:
            reasons["in one of the two only"] += 1
        else:
            reasons["without times of the same mode"] += 1
    told = [f"{count} {reason}" for reason, count in reasons.most_common(_MOST_REASONS)]
    told += ["and others"] if len(reasons) > _MOST_REASONS else []
    return f"nothing was measured on both sides, so that nothing is known: {'; '.join(told)}"


def _result(
    case: Case,
    blocks: tuple[Sequence[Block], Sequence[Block]],
    paired: bool,
    tested: int,
    noise: Noise | None,
    limit: float,
    stage: Any,
) -> CaseResult:
    found = [[block.get(case) for block in side] for side in blocks]
    status = tuple(_status([record for record in side if record]) for side in found)
    values = _values(found, paired) if status == ("ok", "ok") else Blocks((), (), paired)
    estimate = regression.estimate(values, tested, noise)
    return CaseResult(
        case,
        next((str(r.inputs.get("label", "")) for side in found for r in side if r is not None), ""),
        (status[0], status[1]),
        (_geometric(values.a), _geometric(values.b)),
        values,
        stage,
        estimate,
        regression.verdict(estimate, limit, decisive=stage != "first"),
        tuple(_changes(*([r for r in side if r] for side in found))),
    )


def _values(found: Sequence[Sequence[Record | None]], paired: bool) -> Blocks:
    """The block values of both sides; of pairs, only where both processes have one, in the same mode."""
    modes = {r.measurement.mode for side in found for r in side if r and r.measurement}
    if len(modes) > 1:
        return Blocks((), (), paired)
    values = [
        [regression.block_value(r.measurement.rounds) if r and r.measurement else math.nan for r in side]
        for side in found
    ]
    if paired:
        both = [(x, y) for x, y in zip(*values, strict=False) if not (math.isnan(x) or math.isnan(y))]
        return Blocks(tuple(x for x, _ in both), tuple(y for _, y in both), True)
    kept = [tuple(value for value in side if not math.isnan(value)) for side in values]
    return Blocks(kept[0], kept[1], False)


def _status(records: Sequence[Record]) -> str:
    """The worst outcome: one process in which a case went wrong is enough."""
    bad = [record.status for record in records if record.status != "ok"]
    return bad[0] if bad else "ok" if records else "missing"


def _geometric(logs: Sequence[float]) -> float:
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def _means(
    cases: Sequence[Case], blocks: tuple[Sequence[Block], Sequence[Block]], paired: bool, noise: Noise | None
) -> dict[tuple[str, str], tuple[Interval, int]]:
    """Geometric means of what all cases have in common: the blocks of the first stage, by provider and direction."""
    groups: dict[tuple[str, str], list[Blocks]] = {}
    for case in cases:
        found = [[block.get(case) for block in side] for side in blocks]
        values = _values(found, paired)
        right = all(_status([record for record in side if record]) == "ok" for side in found)
        if right and values.a and values.b:
            groups.setdefault((case.provider, case.direction), []).append(values)
    return {place: (regression.geometric_mean(group, noise), len(group)) for place, group in groups.items()}


def _machine(records: Sequence[Sequence[Record]]) -> tuple[str, list[str]]:
    """The device of both sides, and notes on what else differs between their machines and software."""
    devices = [{environments.device_name(r.env) for r in side if r.env} for side in records]
    if devices[0] and devices[1] and devices[0] != devices[1]:
        raise CompareError(
            f"the two sides come from different devices ({', '.join(sorted(devices[0]))}; "
            f"{', '.join(sorted(devices[1]))}): times of different devices do not compare"
        )
    machines = [{environments.machine_key(r.env) for r in side if r.env} for side in records]
    notes = []
    if machines[0] and machines[1] and machines[0] != machines[1]:
        notes.append(
            f"The software differs, and its effect is part of every ratio: {'; '.join(sorted(machines[0]))} against "
            f"{'; '.join(sorted(machines[1]))}."
        )
    if any(device.startswith("CPU") for side in devices for device in side):
        notes.append("Measured on a CPU: a test of the procedure, no performance result.")
    slowed = sum(bool(r.clocks.get("throttled")) for side in records for r in side)
    if slowed:
        notes.append(f"{slowed} of {sum(map(len, records))} blocks were measured while the GPU was throttled.")
    return ", ".join(sorted(devices[0] | devices[1])) or "device not known", notes


# What differs beside times -------------------------------------------------------------------------------------------


def _changes(a: Sequence[Record], b: Sequence[Record]) -> list[str]:
    """Sentences on what changed between the two builds: outcome, errors of tensors, kernels of a call, counters."""
    if not a or not b:
        return [f"only in {'B' if b else 'A'}"]
    was, now = (next((r for r in side if r.status != "ok"), side[0]) for side in (a, b))
    changes = []
    if was.status != now.status:
        changes.append(f"{was.status} -> {now.status}" + (f": {now.reason}" if now.reason else ""))
    errors = {check.tensor: check for check in was.checks}
    for check in now.checks:
        before = errors.get(check.tensor)
        if before and before.rel_norm and check.rel_norm and check.rel_norm > _ERROR_CHANGE * before.rel_norm:
            changes.append(f"error of {check.tensor} {before.rel_norm:.3g} -> {check.rel_norm:.3g}")
    kernels = [r.measurement.kernels_per_call if r.measurement else None for r in (was, now)]
    if kernels[0] and kernels[1] and kernels[0] != kernels[1]:
        changes.append(f"kernels of a call {kernels[0]:g} -> {kernels[1]:g}")
    for name in sorted({*was.counters} & {*now.counters}):
        before, after = was.counters[name], now.counters[name]
        if isinstance(before, int | float) and isinstance(after, int | float) and _differ(before, after):
            changes.append(f"{name} {before:.4g} -> {after:.4g}")
    return changes


def _differ(before: float, after: float) -> bool:
    return abs(after - before) > _COUNTER_CHANGE * max(abs(before), abs(after))


# The noise of a machine ----------------------------------------------------------------------------------------------


def noise_path() -> Path:
    """Where the noise of machines is kept between runs: in the user's cache directory."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "jfabench" / "noise.json"


def measured_noise(found: Comparison, root: Path) -> Noise:
    """The noise that a comparison of a build with itself (below `root`) found in its first stage.

    Raises `CompareError` where it has too few blocks.
    """
    blocks = read_side(root / "a"), read_side(root / "b")
    env = next((dict(r.env) for block in blocks[0] for r in block.values() if r.env), {})
    values = [_values([[block.get(result.case) for block in side] for side in blocks], True) for result in found.cases]
    try:
        return regression.noise_of(values, datetime.now(UTC).isoformat(timespec="seconds"), env)
    except ValueError as error:
        raise CompareError(f"{error}; use --pairs 2 or more") from None


def store_noise(noise: Noise) -> Path:
    """Keeps the noise for later comparisons on the same machine; returns the file."""
    path = noise_path()
    write_json(path, {**_stored_noise(), environments.machine_key(noise.env): noise.to_json()})
    return path


def load_noise(env: Mapping[str, Any]) -> Noise | None:
    """The noise that was measured on the machine that `env` describes, None if there is none that can be read."""
    try:
        return Noise(**_stored_noise()[environments.machine_key(env)])
    except (KeyError, TypeError):
        return None


def _stored_noise() -> dict[str, Any]:
    try:
        data = json.loads(noise_path().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}
