"""Many random problems, and one problem many times: right numbers, completeness, isolation, determinism.

A seed is a case. On a GPU they are many and may be shared out among processes, since most of the time goes to the
compiler; what decides how a kernel is compiled is therefore drawn from `COMBINATIONS` only.

    JFABENCH_RANDOM_CASES=2000 JFABENCH_RANDOM_SHARD=3/12 pytest ...    # the fourth of twelve shares of seeds 0 to 1999
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import pytest
import torch
from attention_check import Answer, answer, largest
from attention_oracle import Problem
from torch import Tensor

from jfabench.check import poisoned_allocations
from jfabench.kernels import jagged_flash_attention
from jfabench.kernels.attention import launch_triton
from jfabench.kernels.attention.launch import launcher

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CASES = int(os.environ.get("JFABENCH_RANDOM_CASES", "6" if INTERPRETED else "400"))
REPETITIONS = 1000
NAN = float("nan")


class Combination(NamedTuple):
    """What a kernel is compiled for."""

    dim: int
    dtype: torch.dtype
    mask: Literal["none", "right", "left", "both"]  # sides on which it is bounded
    group: int
    queries: Literal["whole", "part", "packed"]  # broadcast, in whole blocks of 128 or not, or packed


BF16, FP16 = torch.bfloat16, torch.float16

# Covers every pair of values; the first six cover every value.
COMBINATIONS = [
    Combination(128, FP16, "right", 1, "packed"),
    Combination(64, BF16, "none", 4, "part"),
    Combination(64, FP16, "both", 2, "whole"),
    Combination(128, BF16, "left", 2, "packed"),
    Combination(128, BF16, "both", 1, "whole"),
    Combination(128, FP16, "left", 4, "part"),
    Combination(64, BF16, "right", 1, "part"),
    Combination(64, FP16, "none", 4, "packed"),
    Combination(128, FP16, "none", 2, "whole"),
    Combination(64, BF16, "left", 1, "whole"),
    Combination(64, FP16, "right", 4, "whole"),
    Combination(128, BF16, "both", 2, "part"),
    Combination(64, BF16, "both", 4, "packed"),
    Combination(128, FP16, "right", 2, "part"),
    Combination(128, BF16, "none", 1, "packed"),
    Combination(64, FP16, "left", 2, "packed"),
    Combination(128, BF16, "both", 4, "whole"),
    Combination(64, FP16, "right", 1, "part"),
    Combination(64, FP16, "none", 4, "part"),
    Combination(128, BF16, "left", 1, "whole"),
    # What most measurements are of, and the same with tiles of a single step among others.
    Combination(128, BF16, "none", 1, "whole"),
    Combination(128, BF16, "none", 1, "part"),
    Combination(64, BF16, "none", 1, "packed"),
]
HEADS = {1: [(1, 1), (2, 2)], 2: [(4, 2)], 4: [(4, 1)]}
BLOCKS_OF_M = {"whole": [128, 256], "part": [1, 17, 64, 100, 300]}


@dataclass(frozen=True)
class Sizes:
    """How large a case may be. A program that is interpreted takes milliseconds, and so does every step of it."""

    batch: int
    edges: tuple[int, ...]
    longest: int
    most_queries: int


LARGE = Sizes(batch=12, edges=(0, 1, 2, 63, 64, 65, 127, 128, 129, 255, 256, 257), longest=700, most_queries=300)
SMALL = Sizes(batch=4, edges=(0, 1, 2, 63, 64, 65, 127, 128, 129), longest=150, most_queries=128)


@dataclass(frozen=True)
class Case:
    seed: int
    combination: Combination
    heads: tuple[int, int]
    k_lengths: list[int]
    q_lengths: list[int] | None
    rows: int  # of q
    self_attention: bool  # q_offsets are left out
    causal: bool
    window: tuple[int, int]
    sm_scale: float | None
    offsets_dtype: torch.dtype
    deterministic: bool
    wanted: str  # the inputs that require grad
    config: int  # which of the configurations serves, modulo their number
    spoilt: int  # the sequence that is made NaN
    programs: int | None = None  # of a persistent kernel at most: with few, each has many tiles. None: as on the device

    def __str__(self) -> str:
        return f"seed{self.seed}"


def draw(seed: int, sizes: Sizes) -> Case:
    rng = random.Random(seed)
    combination = COMBINATIONS[seed % len(COMBINATIONS)]

    def lengths(count: int) -> list[int]:
        if rng.random() < 0.05:
            return [0] * count
        return [rng.choice([rng.choice(sizes.edges), rng.randint(0, sizes.longest)]) for _ in range(count)]

    k_lengths = lengths(rng.randint(1, sizes.batch))
    self_attention = combination.queries == "packed" and rng.random() < 0.5
    q_lengths = None
    if combination.queries == "packed":
        q_lengths = k_lengths if self_attention else lengths(len(k_lengths))
        rows = sum(q_lengths)
    else:
        rows = rng.choice([m for m in BLOCKS_OF_M[combination.queries] if m <= sizes.most_queries])

    def bound() -> int:
        return rng.choice([0, 1, 3, 64, rng.randint(0, sizes.longest)])

    causal = combination.mask in ("right", "both") and rng.random() < 0.5
    left = bound() if combination.mask in ("left", "both") else -1
    right = bound() if combination.mask in ("right", "both") and not (causal and rng.random() < 0.5) else -1
    case = Case(
        seed,
        combination,
        heads=rng.choice(HEADS[combination.group]),
        k_lengths=k_lengths,
        q_lengths=q_lengths,
        rows=rows,
        self_attention=self_attention,
        causal=causal,
        window=(left, right),
        sm_scale=rng.choice([None, None, 0.02, 0.3]),
        offsets_dtype=rng.choice([torch.int32, torch.int64]),
        deterministic=rng.random() < 0.5,
        wanted=rng.choice(["qkv"] * 6 + ["q", "k", "v", "qk", "qv", "kv", ""]),
        config=rng.choice([0, rng.randrange(6)]),
        spoilt=rng.randrange(len(k_lengths)),
    )
    return replace(case, programs=rng.choice([None, case.heads[0], 2 * case.heads[0] + 1]))


def my_cases() -> list[Case]:
    """Every n-th, so that processes that share the cases begin with different combinations."""
    share, _, shares = os.environ.get("JFABENCH_RANDOM_SHARD", "0/1").partition("/")
    assert shares, "JFABENCH_RANDOM_SHARD is not of the form i/n: give the share, from 0, and the number of shares."
    return [draw(seed, SMALL if INTERPRETED else LARGE) for seed in range(CASES)[int(share) :: int(shares)]]


@pytest.fixture
def _chosen_config(device: str, monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    """Takes a configuration by number where otherwise some would be timed."""

    def choose(kind: Any, gpu: str, candidates: Any, *_: Any) -> Any:
        return candidates[case.config % len(candidates)]

    family = launcher("auto", torch.empty(0, device=device).device)
    for module in {family, launch_triton}:  # TLX leaves part of its work to plain Triton
        monkeypatch.setattr(module, "choose", choose)
    if case.programs is not None and family is not launch_triton:
        monkeypatch.setattr(family, "multiprocessors", lambda _: case.programs)


class Result(NamedTuple):
    values: dict[str, Tensor]  # out, and the gradients that are wanted
    lse: Tensor

    def equals(self, other: Result) -> bool:
        pairs = [(self.values[name], other.values[name]) for name in self.values]
        return all(torch.equal(a, b) for a, b in [*pairs, (self.lse, other.lse)])


def make(case: Case, device: str) -> tuple[Problem, Tensor]:
    """The inputs, and a gradient of the output."""
    generator = torch.Generator(device).manual_seed(case.seed)
    heads, kv_heads = case.heads

    def normal(rows: int, heads: int) -> Tensor:
        shape = (rows, heads, case.combination.dim)
        return torch.randn(shape, generator=generator, device=device).to(case.combination.dtype)

    keys = sum(case.k_lengths)
    q, k, v = normal(case.rows, heads), normal(keys, kv_heads), normal(keys, kv_heads)
    dout = normal(case.rows * (len(case.k_lengths) if case.q_lengths is None else 1), heads)
    return Problem(q, k, v, case.k_lengths, case.q_lengths, case.causal, case.window, case.sm_scale), dout


def run(case: Case, problem: Problem, dout: Tensor) -> Result:
    """One call, forward and backward. What it does not write of its outputs is NaN."""
    inputs = {name: getattr(problem, name).detach().requires_grad_(name in case.wanted) for name in "qkv"}
    q_offsets = problem.q_offsets
    options = {
        **problem.options,
        "q_offsets": None if q_offsets is None or case.self_attention else q_offsets.to(case.offsets_dtype),
        "deterministic": case.deterministic,
    }
    k_offsets = problem.k_offsets.to(case.offsets_dtype)
    with poisoned_allocations():
        out, lse = jagged_flash_attention(*inputs.values(), k_offsets, return_lse=True, **options)
        wanted = [inputs[name] for name in case.wanted]
        grads = torch.autograd.grad(out, wanted, dout) if wanted else ()
    named = dict(zip([f"d{name}" for name in case.wanted], grads, strict=True))
    return Result({"out": out.detach(), **named}, lse)


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # from the interpreter, where a sequence is NaN
@pytest.mark.usefixtures("_chosen_config")
@pytest.mark.parametrize("case", my_cases(), ids=str)
def test_random_problem(case: Case, device: str) -> None:
    problem, dout = make(case, device)
    right = answer(problem, dout)
    got = run(case, problem, dout)
    right.check(got.values, got.lse)
    if case.deterministic:
        assert got.equals(run(case, problem, dout))
    check_isolation(case, problem, dout, got, right)


def check_isolation(case: Case, problem: Problem, dout: Tensor, clean: Result, right: Answer) -> None:
    """What belongs to one sequence is NaN, and that changes nothing of the others."""
    own_keys = rows_of(case.spoilt, case.k_lengths)
    own_rows = rows_of(case.spoilt, case.q_lengths or [case.rows] * len(case.k_lengths))
    k, v, q, bad_dout = (x.clone() for x in (problem.k, problem.v, problem.q, dout))
    k[own_keys], v[own_keys], bad_dout[own_rows] = NAN, NAN, NAN
    if case.q_lengths is not None:
        q[own_rows] = NAN
    spoilt = run(case, replace(problem, q=q, k=k, v=v), bad_dout)

    other_keys, other_rows = (torch.ones(len(x), dtype=torch.bool, device=x.device) for x in (k, dout))
    other_keys[own_keys], other_rows[own_rows] = False, False
    assert torch.equal(clean.lse[:, other_rows], spoilt.lse[:, other_rows])
    for name, value in spoilt.values.items():
        if name == "dq" and case.q_lengths is None:
            continue  # the sum over all sequences
        others = other_keys if name in ("dk", "dv") else other_rows
        if name == "dq" and not case.deterministic:  # the order of its sums may differ
            right.check_error(name, value[others], right.values[name][others])
        else:
            assert torch.equal(value[others], clean.values[name][others]), name


def rows_of(sequence: int, lengths: list[int]) -> slice:
    start = sum(lengths[:sequence])
    return slice(start, start + lengths[sequence])


def uneven_case(broadcast: bool, deterministic: bool) -> Case:
    """More tiles than a GPU runs at once, of uneven lengths that end inside of blocks, and some of them empty."""
    rng = random.Random(0)
    k_lengths = [rng.choice([0, rng.randint(1, 900)]) for _ in range(96)]
    q_lengths = None if broadcast else [rng.choice([0, rng.randint(1, 500)]) for _ in k_lengths]
    return Case(
        seed=0,
        combination=Combination(128, BF16, "none", 2, "part" if broadcast else "packed"),
        heads=(4, 2),
        k_lengths=k_lengths,
        q_lengths=q_lengths,
        rows=200 if q_lengths is None else sum(q_lengths),
        self_attention=False,
        causal=False,
        window=(-1, -1),
        sm_scale=None,
        offsets_dtype=torch.int32,
        deterministic=deterministic,
        wanted="qkv",
        config=0 if broadcast else 1,  # both sum dq up in one pass with dk and dv, unless they must be deterministic
        spoilt=0,
    )


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="takes hours when interpreted")
@pytest.mark.timeout(120, method="thread")  # a signal does not reach a thread that waits for a GPU
@pytest.mark.usefixtures("_chosen_config")
@pytest.mark.parametrize(
    "case",
    [uneven_case(broadcast, deterministic) for broadcast in (True, False) for deterministic in (True, False)],
    ids=lambda case: f"{case.combination.queries}-{'deterministic' if case.deterministic else 'default'}",
)
def test_a_thousand_times_the_same(case: Case, device: str) -> None:
    problem, dout = make(case, device)
    first = run(case, problem, dout)
    limits = {name: 0.01 * largest(value) for name, value in first.values.items()}
    for repetition in range(1, REPETITIONS):
        again = run(case, problem, dout)
        if case.deterministic:
            assert again.equals(first), repetition
        for name, value in again.values.items():
            assert largest(value.float() - first.values[name].float()) <= limits[name], (name, repetition)
