"""The backward kernel compiles for sm_100a in every shipped configuration, within the machine's limits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SHARED_LIMIT = 227 * 1024  # bytes that one program may have
TMEM_COLUMNS = 512
TENSOR = {"tensor", "tmem_load", "tmem_store", "tma_load", "tma_store", "tma_reduce", "exp2"}
# What a role's code must contain; the rest of these it must not.
DOES = {
    "store": {"tmem_load", "tma_store"},
    "differentiate": {"tmem_load", "tmem_store", "exp2"},
    "reduce": {"tmem_load", "tma_reduce"},
    "multiply": {"tensor"},
    "load": {"tma_load"},
    "load_statistics": set(),
    "queue": set(),
}
# Bytes that may spill. The compiler's own code, which hands warps their roles, has 56 registers for each of 20 warps;
# what it computes before is stored once, and read once by each role. Of a pair the multiplier, one warp, keeps some
# words there, and with a mask the differentiating groups keep words about a tile, which a masked step reads.
SPILLED = {(1, False): 224, (1, True): 224, (2, False): 320, (2, True): 768}  # by CTAs, and whether there is a mask
STORED = {"multiply": 16}  # words that a role stores, else 2
STORED_IN_MASKED_PAIRS = {"multiply": 16, "differentiate": 24}
SPILLED_FLOAT16 = 288  # of a pair under a causal mask with grouped heads; 272 when this was written
SLOW = [pytest.mark.slow, pytest.mark.timeout(1200)]


def compiled(cases: str, dtype: str) -> list[dict[str, Any]]:
    """What `backward_report.py` says, in a child process, where the interpreter is off."""
    script = Path(__file__).parent / "backward_report.py"
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, str(script), cases, dtype]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    rows: list[dict[str, Any]] = json.loads(child.stdout.splitlines()[-1])
    return rows


@pytest.mark.parametrize(
    ("cases", "dtype"),
    [
        ("few", "bfloat16"),
        pytest.param("all", "bfloat16", marks=SLOW),
        pytest.param("all", "float16", marks=SLOW),
    ],
)
def test_configurations_compile_within_limits(cases: str, dtype: str) -> None:
    rows = compiled(cases, dtype)
    assert {(row["config"]["ctas"], row["config"]["clc"], row["config"]["add_dq"]) for row in rows} >= {
        (1, False, True),
        (1, True, True),
        (1, False, False),
        (2, False, True),
        (2, True, True),
    }
    for row in rows:
        check(row)


def test_a_masked_pair_in_float16_compiles_within_limits() -> None:
    """The default configuration of 256 keys or more; it spills as many bytes in bfloat16."""
    (row,) = compiled("masked", "float16")
    assert (row["dtype"], row["mask"], row["config"]["ctas"]) == ("float16", "causal", 2)
    check(row)
    assert row["spilled_bytes"] <= SPILLED_FLOAT16, spilled_words(row)


def spilled_words(row: dict[str, Any]) -> str:
    """Which roles spill how many words, and how many a role reads back."""
    words = [
        f"{role} {counts['local_store']} stored, {counts['local_load']} loaded"
        for role, counts in row["roles"].items()
        if counts["local_store"] or counts["local_load"]
    ]
    return f"{row['spilled_bytes']} bytes spilled; words: {'; '.join(words)}"


def check(row: dict[str, Any]) -> None:
    ctas, add_dq = row["config"]["ctas"], row["config"]["add_dq"]
    assert row["shared_bytes"] <= min(SHARED_LIMIT, row["estimated_shared_bytes"]), row
    assert row["tmem_columns"] <= TMEM_COLUMNS, row
    assert row["registers"] * 640 <= 65536, row  # at launch, of 20 warps
    masked = row["mask"] != "none"
    assert row["spilled_bytes"] <= SPILLED[ctas, masked], row
    assert DOES.keys() < row["roles"].keys(), row
    for role, does in DOES.items():
        counts = row["roles"][role]
        expected = does if add_dq or role != "reduce" else set()
        assert {name for name in TENSOR if counts[name]} == expected, (role, row)
        stored = STORED_IN_MASKED_PAIRS if masked and ctas == 2 else STORED
        assert counts["local_store"] <= stored.get(role, 2), (role, row)
