"""The forward kernel for Blackwell compiled offline, and what its configurations take; nothing runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from jfabench.kernels.attention import config_sm100 as configs
from jfabench.kernels.attention.config_sm100 import LOW, ON_DEMAND, PAIR, SHORT, WIDE, ForwardConfig
from jfabench.kernels.attention.kinds import Kind

SHARED_LIMIT = 227 * 1024  # bytes that one program may have
TMEM_LIMIT = 512  # columns of a multiprocessor
# Words about a thread, such as its number, which the compiler keeps across the start of the roles, and words about a
# tile, read once in it. In bfloat16 the loops over blocks of keys that are not masked spill nothing; the quartic, which
# float16 needs, takes more registers. By dtype: bytes, and words that the softmax groups store without and with a mask.
SPILLED = {"bfloat16": (80, 0, 4), "float16": (160, 12, 24)}

# In a child process, where the interpreter is off: in a dtype the launches of the numbers given, or all.
PROGRAM = """
import json, sys, torch
from jfabench import sass
from jfabench.kernels.attention import offline
offline.DTYPE = getattr(torch, sys.argv[1])
chosen = {int(number) for number in sys.argv[2:]}
launches = [launch for launch in offline.launches("sm100", "forward", 100) if launch.role]
for i, launch in enumerate(launches):
    if chosen and i not in chosen:
        continue
    binary = offline.compile_launch(launch, 100)
    said = sass.parse_assembler(offline.assembler_report(binary.ptx, 100))
    regions = [sass.Region(t.role, t.copies, t.file, t.first, t.last) for t in offline.tasks(launch)]
    mixes = {m.role: m.counts for m in sass.mixes(offline.disassembly(binary.cubin), regions)}
    print(json.dumps([{**launch.case._asdict()}, dict(launch.config), said._asdict(), binary.shared_bytes,
                      binary.tmem_columns, mixes]))
"""


def compiled(dtype: str, *numbers: int) -> list[Any]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", PROGRAM, dtype, *map(str, numbers)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(
    dtype: str, case: dict[str, Any], fields: dict[str, Any], said: dict[str, Any], shared: int, tmem: int, mixes: Any
) -> None:
    config, head_dim = ForwardConfig(**fields), case["head_dim"]
    assert shared <= config.shared_bytes(head_dim) <= SHARED_LIMIT // config.residents
    assert tmem <= config.tmem_columns(head_dim) <= TMEM_LIMIT // config.residents
    assert said["registers"] <= config.launch_registers
    spilled, unmasked, masked = SPILLED[dtype]
    assert said["spill_store_bytes"] <= spilled
    roles = ["all", "correct", "softmax", "multiply", "load", "store"]
    assert list(mixes) == [*roles, *(["schedule"] if config.order == "clc" else []), "rest"]
    assert mixes["multiply"]["local_store"] == 0
    assert mixes["softmax"]["local_store"] <= (unmasked if case["mask"] == "none" else masked)
    assert mixes["load"]["tma_load"] == mixes["all"]["tma_load"] > 0
    assert mixes["store"]["tma_store"] == mixes["all"]["tma_store"] > 0
    assert mixes["multiply"]["tensor"] == mixes["all"]["tensor"] > 0
    assert mixes["softmax"]["exp2"] == mixes["all"]["exp2"] > 0
    # Two loops in each group, over masked blocks and others, and the decay in each.
    each = 2 * config.block_n + 2 - config.polynomial * config.p_parts
    assert mixes["softmax"]["exp2"] == config.groups * each


def test_the_default_and_the_pair_compile_within_limits() -> None:
    found = compiled("bfloat16", 0, 4)
    assert [fields["ctas"] for _, fields, *_ in found] == [1, 2]
    for row in found:
        check("bfloat16", *row)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dtype", SPILLED)
def test_all_compile_within_limits(dtype: str) -> None:
    found = compiled(dtype)
    assert {tuple(fields.values()) for _, fields, *_ in found} == {tuple(vars(c).values()) for c in configs.FORWARD}
    for row in found:
        check(dtype, *row)


@pytest.mark.parametrize(
    ("config", "head_dim", "shared", "tmem"),
    [
        # Q and four blocks of K or V of 32 KB each, two blocks of O of 16 KB; S and O of two groups.
        (WIDE, 128, (2 + 4) * 32 + 2 * 16, 2 * (128 + 128)),
        (WIDE, 64, (2 + 4) * 16 + 2 * 16, 512),  # 2 * (128 + 64), and columns are allocated in powers of two
        (SHORT, 128, 2 * 32 + 8 * 16 + 2 * 16, 512),
        (LOW, 128, 32 + 4 * 16 + 16, 256),
        (PAIR, 128, 2 * 32 + 8 * 16 + 2 * 16, 512),
    ],
)
def test_what_a_configuration_takes(config: ForwardConfig, head_dim: int, shared: int, tmem: int) -> None:
    assert config.shared_bytes(head_dim) == 1024 * shared + 1024
    assert config.tmem_columns(head_dim) == tmem


@pytest.mark.parametrize("config", configs.FORWARD)
def test_the_roles_share_the_registers_that_a_program_has(config: ForwardConfig) -> None:
    groups_of_warps = config.groups + 2
    roles = config.groups * config.softmax_registers + config.corrector_registers + config.single_registers
    assert roles == groups_of_warps * config.launch_registers
    assert config.residents * 128 * roles <= 65536


@pytest.mark.parametrize(
    ("config", "head_dim"),
    [
        (replace(WIDE, kv_stages=2), 128),
        (replace(WIDE, kv_stages=5), 128),  # shared memory
        (replace(WIDE, block_n=256, kv_stages=3), 64),  # tensor memory
        (replace(WIDE, softmax_registers=216), 128),
        (replace(WIDE, order="random"), 128),
        (replace(WIDE, groups=3), 128),
        (replace(WIDE, polynomial=65), 128),
        (replace(WIDE, residents=2), 64),
        (PAIR, 64),
    ],
)
def test_what_does_not_fit(config: ForwardConfig, head_dim: int) -> None:
    assert not config.fits(head_dim, SHARED_LIMIT)


def kind(mean_q: int, mean_k: int, head_dim: int = 128) -> Kind:
    return Kind("sm100", "forward", "bfloat16", head_dim, 1, True, False, False, mean_q, mean_k)


@pytest.mark.parametrize(
    ("mean_q", "mean_k", "expected"), [(256, 512, WIDE), (256, 32, SHORT), (128, 1024, LOW), (64, 16, LOW)]
)
def test_the_default_goes_by_the_lengths(mean_q: int, mean_k: int, expected: ForwardConfig) -> None:
    assert configs.default(kind(mean_q, mean_k)) == expected
    usable = configs.candidates(kind(mean_q, mean_k), SHARED_LIMIT)
    assert usable[0] == expected
    assert set(usable) == set(configs.FORWARD)
    assert PAIR not in configs.candidates(kind(mean_q, mean_k, 64), SHARED_LIMIT)
    assert ON_DEMAND in usable


@pytest.mark.parametrize(
    ("config", "pairs", "programs"),
    [
        (WIDE, 1000, 148),
        (WIDE, 100, 100),
        (replace(WIDE, residents=2), 1000, 296),
        (PAIR, 1000, 148),  # 74 of them, of two CTAs
        (PAIR, 10, 20),
        (ON_DEMAND, 1000, 1000),
        (replace(PAIR, order="clc"), 1000, 2000),
    ],
)
def test_how_many_ctas_are_launched(
    monkeypatch: pytest.MonkeyPatch, config: ForwardConfig, pairs: int, programs: int
) -> None:
    from jfabench.kernels.attention import launch_sm100

    monkeypatch.setattr(launch_sm100, "multiprocessors", lambda _device: 148)
    problem: Any = SimpleNamespace(heads=2, q=torch.empty(0))
    tiles: Any = SimpleNamespace(most=pairs // 2)
    assert launch_sm100._programs(problem, config, tiles) == programs


def test_more_rows_than_a_ragged_descriptor_has_are_left_to_plain_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    from jfabench.kernels.attention import launch_sm100
    from jfabench.kernels.attention.problem import make_problem

    x, ends = torch.zeros(9, 2, 64, dtype=torch.bfloat16), torch.tensor([0, 4, 9])
    problem = make_problem(x, x, x, ends, None, 0.1, (-1, -1), False)  # 18 rows of queries
    monkeypatch.setattr(launch_sm100.launch_triton, "forward", lambda given: ("plain", given))
    monkeypatch.setattr(launch_sm100, "RAGGED_ROWS", 17)
    assert launch_sm100.forward(problem) == ("plain", problem)
