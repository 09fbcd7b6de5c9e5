"""What the kernels record: the builds with and without it, and how its rows are read. Nothing here needs a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from jfabench.kernels.attention import record
from jfabench.kernels.attention.tiles import ENTRY, TileList

SHARED_LIMIT = 227 * 1024  # bytes that one program may have on sm_90
WORDS = 6 + len(record.WAITS)


# Builds --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def builds() -> dict[str, Any]:
    script = Path(__file__).parent / "recording_builds.py"
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    child = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    found: dict[str, Any] = json.loads(child.stdout)
    assert {name.split()[0] for name in found} == {"forward_sm90_kernel", "backward_sm90_kernel"}
    return found


def test_switched_off_it_leaves_no_trace_in_the_machine_code(builds: dict[str, Any]) -> None:
    for name, build in builds.items():
        assert build["off"] == build["removed"], name
        assert build["off"] != build["recorded"], name


def test_switched_on_it_costs_neither_spills_nor_order(builds: dict[str, Any]) -> None:
    for name, build in builds.items():
        assert build["spilled_bytes"]["on"] <= build["spilled_bytes"]["off"], name
        assert build["shared_bytes"] <= SHARED_LIMIT, name
        assert not build["serialised"], name


def test_waits_stand_between_two_readings_of_the_clock(builds: dict[str, Any]) -> None:
    for name, build in builds.items():
        assert build["without_clock"] == [], name


# Rows ----------------------------------------------------------------------------------------------------------------

HEADS = 2
ENTRIES = np.array(
    # block, q_start, q_len, k_start, k_len, out_start
    [[1, 0, 200, 10, 90, 0], [0, 0, 200, 10, 90, 0], [0, 0, 200, 0, 10, 200]],
    np.int32,
)
# Of two programs and three roles: multiprocessor, index of the pair, begin and end in ns and cycles, and waits by name.
PROGRAM_0, PROGRAM_1 = 7, 3  # their multiprocessors
WALKS = {0: [0, 3, 4], 1: [1, 2, 5]}  # indices of the pairs, in zigzag
FIRST_NS, FIRST_CYCLES = 2**32 - 1000, 2**31 - 500  # both wrap around soon


def written(*, complete: bool = True, roles: int = 3) -> tuple[Any, Any, list[dict[str, int]]]:
    """`words` and `entries` as a kernel leaves them, and the rows that were meant."""
    words = np.zeros((4, 2, 3, WORDS), np.uint32)
    meant = []
    for program, sm in ((0, PROGRAM_0), (1, PROGRAM_1)):
        for role in range(roles):
            ns, cycles = FIRST_NS + 100 * program, FIRST_CYCLES + 5000 * program
            words[0, program, role, 2:4] = ns % 2**32, cycles % 2**32
            for step, pair in enumerate(WALKS[program]):
                if not complete and (program, step) == (1, 2):
                    continue
                begin, took = ns, 400 + 10 * pair + role
                ns, cycles = ns + took, cycles + 2 * took
                waits = {name: (pair + 1) * (role + 1) * i for i, name in enumerate(record.WAITS)}
                end_words = (ns % 2**32, cycles % 2**32)
                words[step, program, role] = [
                    *(sm, pair + 1, *words[step, program, role, 2:4], *end_words),
                    *waits.values(),
                ]
                block, _, q_len, k_start, k_len, out_start = (int(x) for x in ENTRIES[pair // HEADS])
                meant.append(
                    {"sm": sm, "program": program, "role": role, "step": step, "tile": pair // HEADS}
                    | {"head": pair % HEADS, "block": block, "q_len": q_len, "k_start": k_start, "k_len": k_len}
                    | {"out_start": out_start, "begin": begin - FIRST_NS, "end": ns - FIRST_NS, "cycles": 2 * took}
                    | {f"wait_{name}": count for name, count in waits.items()}
                )
    entries = np.zeros((1 + 3 + 2, ENTRY.value), np.int32)  # the list has room for two more
    entries[0, 0] = len(ENTRIES)
    entries[1:4, :6] = ENTRIES
    return words.view(np.int32), entries, meant


@pytest.mark.parametrize("roles", [2, 3])
def test_rows_say_what_was_written(roles: int) -> None:
    words, entries, meant = written(roles=roles)
    rows = record.decode(words, entries, HEADS)
    found = [dict(zip(rows, map(int, values), strict=True)) for values in zip(*rows.values(), strict=True)]
    assert found == meant


def test_what_comes_after_the_last_tile_is_left_out() -> None:
    words, entries, meant = written()
    words[3, 0, 1, 6:] = 5  # a wait of a program that has nothing to do any more
    assert len(record.decode(words, entries, HEADS)["sm"]) == len(meant)


def test_an_incomplete_recording_is_no_recording() -> None:
    words, entries, _ = written(complete=False)
    with pytest.raises(ValueError, match="of 6 tiles were recorded: loader 5, consumer 0 5, consumer 1 5"):
        record.decode(words, entries, HEADS)
    with pytest.raises(ValueError, match="the kernel did not run"):
        record.decode(np.zeros_like(words), entries, HEADS)


# Launches ------------------------------------------------------------------------------------------------------------


def test_launches_have_a_buffer_only_while_they_are_recorded() -> None:
    tiles = TileList(torch.zeros(6, ENTRY.value, dtype=torch.int32), 5)
    assert record.buffer("forward", 3, tiles, HEADS) is None
    with record.recording() as found:
        words = record.buffer("forward", 3, tiles, HEADS)
        with pytest.raises(RuntimeError, match="already"), record.recording():
            pass
    assert record.buffer("forward", 3, tiles, HEADS) is None
    assert words is not None
    # Ten pairs among three programs are four rounds; then waits that follow the last tile.
    assert words.shape == (5, 3, len(record.ROLES), WORDS)
    assert [each.words is words for each in found] == [True]
