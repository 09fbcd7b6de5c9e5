"""Result folders -> everything that a report needs to know, whether the run was finished, killed or foreign."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from jfabench.folder import Ceilings, Manifest, ResultFolder, write_whole
from jfabench.records import NEUTRAL_STATUSES, Record, read_records
from jfabench.reports import derive


@dataclass(frozen=True)
class Results:
    """The merged contents of result folders.

    `rows` is `derive.table` of `records`; `warnings` are sentences that a reader must know before believing a number;
    `bad_lines` are `(file, line number, why)`.
    """

    folders: tuple[ResultFolder, ...]
    target: ResultFolder
    records: tuple[Record, ...]
    manifest: Manifest | None
    ceilings: Ceilings | None
    baseline: str | None
    rows: pd.DataFrame
    environments: tuple[tuple[Mapping[str, Any], int], ...]
    warnings: tuple[str, ...]
    bad_lines: tuple[tuple[str, int, str], ...]

    @property
    def devices(self) -> list[str]:
        return [name for name in self.rows["gpu"].unique() if name]

    @property
    def on_cpu(self) -> bool:
        """Whether any of the numbers comes from a CPU."""
        if self.devices:
            return any(name.startswith(derive.CPU) for name in self.devices)
        return self.manifest is not None and self.manifest.device.split(":")[0] == "cpu"

    @property
    def axes(self) -> list[str]:
        """The parameters that the grids vary, slowest first; without a manifest, whatever does vary."""
        params = derive.param_columns(self.rows)
        varying = [name for name in params if self.rows[name].nunique(dropna=False) > 1]
        if self.manifest is None:
            return varying
        named = [p for axis in self.manifest.axes for p in params if p == axis or p.startswith(f"{axis}.")]
        return list(dict.fromkeys(named))

    @cached_property
    def grids(self) -> list[pd.DataFrame]:
        """The rows of each grid: those of one operator whose parameters have the same names, without other columns."""
        case_of = {r.case.shape_key: r.case for r in self.records}
        grid_of = {key: (case.operator, frozenset(derive.flatten(case.params))) for key, case in case_of.items()}
        places: dict[tuple[str, frozenset[str]], list[int]] = {}
        for row, record in enumerate(self.records):
            places.setdefault(grid_of[record.case.shape_key], []).append(row)
        params = derive.param_columns(self.rows)
        return [
            self.rows.iloc[at].drop(columns=[name for name in params if name not in names])
            for (_, names), at in places.items()
        ]


def load(folders: Sequence[ResultFolder], target: ResultFolder | None = None) -> Results:
    """Reads and merges folders; where a case occurs in several, the record of the last folder counts.

    Raises `FileNotFoundError` where none of them holds records, and `ValueError`, which names the file, where one is of
    a newer schema, packed records are damaged, or `run.json` or `ceilings.json` is damaged or somebody else's.
    """
    merged: dict[str, tuple[Record, float]] = {}
    bad: list[tuple[str, int, str]] = []
    warnings: list[str] = []
    found = [folder for folder in folders if folder.stored.exists()]
    if not found:
        names = ", ".join(str(folder.root) for folder in folders)
        raise FileNotFoundError(f"{names}: no records.jsonl; name a folder that `python -m jfabench sweep` wrote")
    manifests = [folder.read_manifest() for folder in found]
    for folder, run in zip(found, manifests, strict=True):
        try:
            file = read_records(folder.stored)
        except ValueError as error:
            raise ValueError(f"{folder.stored}: {error}") from None
        again = [(merged[r.case.key][0], r) for r in file.records if r.case.key in merged]
        if again:
            elsewhere = {derive.gpu_name(was.env) for was, _ in again} - {derive.gpu_name(now.env) for _, now in again}
            if elsewhere:
                raise ValueError(
                    f"{folder.root}: repeats cases that another folder has from {', '.join(sorted(elsewhere))}; "
                    "results of different devices cannot be merged into one table: report each by itself"
                )
            warnings.append(f"{folder.root.name} repeats {len(again)} cases of another folder: the later ones count.")
        for record in file.records:
            merged.pop(record.case.key, None)
            merged[record.case.key] = record, _target(folder, run)
        bad += [(str(folder.stored), line, why) for line, why in file.bad_lines]
        warnings += _unfinished(folder, run, len(file.records), len(found) > 1)
    records = tuple(record for record, _ in merged.values())
    manifest = _merged_manifest([run for run in manifests if run])
    baseline = manifest.baseline if manifest else None
    all_ceilings = [c for folder in found if (c := folder.read_ceilings())]
    ceilings = all_ceilings[0] if all_ceilings else None
    rows = derive.table(records, ceilings, baseline, [target for _, target in merged.values()])
    environments = tuple(derive.environments(records))
    results = Results(
        tuple(found), target or found[0], records, manifest, ceilings, baseline, rows, environments, (), tuple(bad)
    )
    warnings += _doubts(results, all_ceilings)
    return replace(results, warnings=tuple(warnings))


def _merged_manifest(manifests: Sequence[Manifest]) -> Manifest | None:
    """The first one, with the axes and providers of all."""
    if not manifests:
        return None
    axes = dict.fromkeys(axis for manifest in manifests for axis in manifest.axes)
    providers = {name: text for manifest in reversed(manifests) for name, text in manifest.providers.items()}
    ordered = {name: providers[name] for manifest in manifests for name in manifest.providers}
    baseline = next((manifest.baseline for manifest in manifests if manifest.baseline), None)
    return replace(manifests[0], axes=tuple(axes), providers=ordered, baseline=baseline)


def _target(folder: ResultFolder, manifest: Manifest | None) -> float:
    target = manifest.policy.get("target", derive.DEFAULT_TARGET) if manifest else derive.DEFAULT_TARGET
    if not isinstance(target, int | float):
        raise ValueError(f"{folder.manifest}: policy.target is not a number; restore the file, or move it away")
    return target


def _unfinished(folder: ResultFolder, manifest: Manifest | None, records: int, several: bool) -> list[str]:
    if manifest is None:
        return [
            f"{folder.root.name}: no run.json here, so it is not known which grid was asked for, nor if it is complete."
        ]
    if records >= manifest.cases:
        return []
    where = f"{folder.root.name}: " if several else ""
    return [
        f"{where}Unfinished: {records:,} of {manifest.cases:,} cases have a record. "
        "The command of the run with --resume measures the rest."
    ]


def _doubts(results: Results, all_ceilings: Sequence[Ceilings]) -> list[str]:
    rows, doubts = results.rows, []
    if results.on_cpu:
        doubts.append(
            "Measured on a CPU: these times show that the code runs and is right; they are no performance result."
        )
    if len(results.devices) > 1:
        doubts.append(
            f"More than one device is mixed here ({', '.join(results.devices)}): "
            "compare numbers only within one. Speedups across devices are left blank."
        )
    for key in _differing(results.environments):
        values = dict.fromkeys(str(env.get(key, "not recorded")) for env, _ in results.environments if env)
        doubts.append(f"Records with different {key} are mixed: {', '.join(values)}.")
    if len({(c.device, tuple(sorted(c.flops.items())), c.bytes) for c in all_ceilings}) > 1:
        doubts.append("The folders bring different ceilings; the first folder's are used.")
    if results.ceilings and results.devices and results.ceilings.device not in results.devices:
        doubts.append(
            f"The ceilings are those of {results.ceilings.device}, which nothing here ran on: rooflines are left blank."
        )
    ok = rows[rows["status"] == "ok"]
    flags = [str(words).split() for words in ok["flags"]]
    for flag, text in _FLAG_TEXTS.items():
        if count := sum(flag in words for words in flags):
            doubts.append(f"{count:,} of {len(ok):,} measured cases {text}")
    if len(ok) and results.baseline is not None:
        for direction in derive.directions(rows):
            group = rows[rows["direction"] == direction]
            base = group[(group["provider"] == results.baseline) & (group["status"] == "ok")]
            if base.empty:
                doubts.append(
                    f"No speedups for {direction}: the baseline {results.baseline} has no ok record in that direction."
                )
    if any(str(commit).endswith("+") for commit in rows["commit"]):
        doubts.append("Measured from a work tree with uncommitted changes (commit marked +): not reproducible from it.")
    if number := len(results.bad_lines):
        lines = "line" if number == 1 else "lines"
        doubts.append(f"{number:,} {lines} of records.jsonl could not be read: left out, and named under Failures.")
    return doubts


_FLAG_TEXTS = {
    "throttled": "ran while the GPU was throttled (flag throttled): they may be too slow.",
    "imprecise": "have an interval wider than what was asked for (flag imprecise).",
    "single-round": "have a single round: their interval cannot show drift (flag single-round).",
    "not-interleaved": "were not measured in turns with the baseline: a drift of the clocks between the two is part of "
    "their speedup (flag not-interleaved).",
    "gaps": "let the GPU idle between their kernels, which their time does not hold (flag gaps; column span does).",
    "unchecked": "were not checked against the oracle (flag unchecked).",
    "partly-checked": "have results that were not checked, though other providers' were (flag partly-checked).",
    "above-roofline": "are faster than the ceilings allow: by a few per cent where reads dominate, or one "
    "of the two is wrong (flag above-roofline).",
}

# What must be equal for times to compare; names as in `Record.env`.
_SOFTWARE = ("driver", "cuda", "torch", "flash_attn_4", "flash_attn_3", "fa3_fwd", "jfabench", "commit")
_PREFIXES = ("triton.", "variables.")


def _differing(environments: Sequence[tuple[Mapping[str, Any], int]]) -> list[str]:
    known = [env for env, _ in environments if env]
    keys = dict.fromkeys(key for env in known for key in env if key in _SOFTWARE or key.startswith(_PREFIXES))
    return [key for key in keys if len({str(env.get(key)) for env in known}) > 1]


def write_table(results: Results) -> Path:
    """Writes `results.csv`, whole or not at all: all columns of all rows, floats with 10 significant digits."""
    write_whole(results.target.table, results.rows.to_csv(index=False, float_format="%.10g").encode())
    return results.target.table


def not_ok(results: Results) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The rows without a right result: those that failed, and those never expected to give one here."""
    rows = results.rows[results.rows["status"] != "ok"]
    neutral = rows["status"].isin(NEUTRAL_STATUSES)
    return rows[~neutral], rows[neutral]
