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


@pytest.mark.parametrize("cases", ["few", pytest.param("all", marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
def test_configurations_compile_within_limits(cases: str) -> None:
    script = Path(__file__).parent / "backward_report.py"
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    child = subprocess.run(
        [sys.executable, str(script), cases], env=environment, capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, child.stderr
    rows = json.loads(child.stdout.splitlines()[-1])
    assert {(row["config"]["ctas"], row["config"]["clc"], row["config"]["add_dq"]) for row in rows} >= {
        (1, False, True),
        (1, True, True),
        (1, False, False),
        (2, False, True),
        (2, True, True),
    }
    for row in rows:
        check(row)


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
