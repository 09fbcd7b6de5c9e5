"""Mutations of small kernels of which it is known what each fault does."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.language.extra.tlx import barrier_wait as wait_under_another_name
from triton.tools.tensor_descriptor import TensorDescriptor

from jfabench.cli import main
from jfabench.sim.attention import Case
from jfabench.sim.mutate import BaselineError, MutationReport, mutate
from jfabench.sim.mutate_attention import mutate_attention
from jfabench.sim.mutations import KINDS, functions, mutations


@triton.jit
def wait(bar, phase, needed):
    tlx.barrier_wait(bar, phase, needed)


@triton.jit
def copy_kernel(src, dst, blocks, twice):
    """Blocks of 16 rows pass through a ring of two slots, and leave by TMA."""
    tiles = tlx.local_alloc((16, 64), tl.float16, 2)
    staged = tlx.local_alloc((16, 64), tl.float16, 1)
    full = tlx.alloc_barriers(num_barriers=2, arrive_count=1)
    empty = tlx.alloc_barriers(num_barriers=2, arrive_count=1)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            for i in range(blocks):
                wait(full[i % 2], (i // 2) & 1, i >= 0)
                wait(full[i % 2], (i // 2) & 1, twice > 0)
                x = tlx.local_load(tiles[i % 2])
                tlx.barrier_arrive(empty[i % 2], 1)
                tlx.async_descriptor_store_wait(0)
                tlx.local_store(staged[0], x)
                tlx.async_descriptor_store(dst, staged[0], [i * 16, 0])
            tlx.async_descriptor_store_wait(0)
        with tlx.async_task(num_warps=1):
            for i in range(blocks):
                wait(empty[i % 2], ((i // 2) & 1) ^ 1, i >= 0)
                tlx.barrier_expect_bytes(full[i % 2], 16 * 64 * 2)
                tlx.async_descriptor_load(src, tiles[i % 2], [i * 16, 0], full[i % 2])


@triton.jit
def multiply_kernel(a_rows, b_rows, out):
    """``[128, 64] @ [64, 64]`` on Blackwell; the barrier tells of the product, the commit of the end of all."""
    a = tlx.local_alloc((128, 64), tl.float16, 1)
    b = tlx.local_alloc((64, 64), tl.float16, 1)
    product = tlx.local_alloc((128, 64), tl.float32, 1, tlx.storage_kind.tmem)
    loaded = tlx.alloc_barriers(num_barriers=1, arrive_count=1)
    done = tlx.alloc_barriers(num_barriers=2, arrive_count=1)
    tlx.barrier_expect_bytes(loaded[0], 2 * (128 * 64 + 64 * 64))
    tlx.async_descriptor_load(a_rows, a[0], [0, 0], loaded[0])
    tlx.async_descriptor_load(b_rows, b[0], [0, 0], loaded[0])
    wait_under_another_name(loaded[0], 0)
    barriers = [done[0]]
    tlx.async_dot(a[0], b[0], product[0], use_acc=False, mBarriers=barriers)
    tlx.tcgen05_commit(done[1])
    tlx.barrier_wait(done[0], 0)
    tlx.barrier_wait(done[1], 0)
    rows = tl.arange(0, 128)[:, None]
    tl.store(out + rows * 64 + tl.arange(0, 64)[None, :], tlx.local_load(product[0]))


@triton.jit
def exchange_kernel(src, out):
    """Each of two CTAs copies 64 values to shared memory by ``cp.async``, and gives them to the other."""
    mine = tlx.local_alloc((64,), tl.float32, 1)
    theirs = tlx.local_alloc((64,), tl.float32, 1)
    rank = tlx.cluster_cta_rank()
    offsets = rank * 64 + tl.arange(0, 64)
    token = tlx.async_load(src + offsets, mine[0])
    tlx.async_load_commit_group([token])
    tlx.async_load_wait_group(0)
    tlx.remote_shmem_store(theirs[0], tlx.local_load(mine[0]), rank ^ 1)
    tlx.cluster_barrier()
    tl.store(out + offsets, tlx.local_load(theirs[0]))


@triton.jit
def spinning_kernel(flag):
    """One warp group polls global memory for what the other writes once it was let go on."""
    go = tlx.alloc_barriers(num_barriers=1, arrive_count=1)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tlx.barrier_wait(go[0], 0)
            tl.atomic_add(flag, 1)
        with tlx.async_task(num_warps=4):
            tlx.barrier_arrive(go[0], 1)
            while tl.atomic_add(flag, 0) == 0:
                pass


def copy(blocks: int = 5, twice: int = 0) -> None:
    src = torch.arange(blocks * 16 * 64).reshape(blocks * 16, 64).half()
    dst = torch.zeros_like(src)
    copy_kernel[(1,)](*[TensorDescriptor(x, list(x.shape), [64, 1], [16, 64]) for x in (src, dst)], blocks, twice)
    torch.testing.assert_close(dst, src)


def multiply() -> None:
    a, b = torch.randn(128, 64).half(), torch.randn(64, 64).half()
    out = torch.zeros(128, 64)
    multiply_kernel[(1,)](*[TensorDescriptor(x, list(x.shape), [64, 1], list(x.shape)) for x in (a, b)], out)
    torch.testing.assert_close(out, a.float() @ b.float(), atol=1e-3, rtol=1e-3)


def exchange() -> None:
    src, out = torch.arange(128.0), torch.zeros(128)
    exchange_kernel[(2,)](src, out, ctas_per_cga=(2, 1, 1))
    torch.testing.assert_close(out, src.reshape(2, 64).flip(0).flatten())


def spin() -> None:
    flag = torch.zeros(1, dtype=torch.int32)
    spinning_kernel[(1,)](flag)


def verdicts(report: MutationReport, kind: str) -> list[tuple[str, str]]:
    return [(o.verdict, o.by) for o in report.outcomes if o.mutation.kind == kind]


@pytest.fixture(scope="module")
def copied() -> MutationReport:
    return mutate(copy, copy_kernel, seeds=1)


def test_mutations_are_found_in_the_kernel_and_in_what_it_calls() -> None:
    assert [fn.__name__ for fn in functions(copy_kernel)] == ["copy_kernel", "wait"]
    found = Counter(mutation.kind for mutation in mutations(copy_kernel))
    assert found == {
        "barrier-wait": 1,
        "phase": 1,
        "barrier-arrive": 1,
        "store-wait": 2,
        "store-pending": 2,
        "expect-bytes": 1,
    }
    phase = next(mutation for mutation in mutations(copy_kernel) if mutation.kind == "phase")
    assert (phase.function, phase.text) == ("wait", "tlx.barrier_wait(bar, phase, needed)")
    assert Path(phase.file).read_text().splitlines()[phase.line - 1].strip() == phase.text


def test_calls_are_known_by_what_they_call_and_barriers_by_the_matmul_they_are_for() -> None:
    texts = {(mutation.kind, mutation.text) for mutation in mutations(multiply_kernel)}
    assert ("barrier-wait", "wait_under_another_name(loaded[0], 0)") in texts
    assert ("dot-arrive", "mBarriers: done[0]") in texts
    assert ("commit", "tlx.tcgen05_commit(done[1])") in texts


def test_every_fault_of_a_ring_is_caught(copied: MutationReport) -> None:
    assert copied.survivors == []
    assert verdicts(copied, "barrier-wait").count(("caught", "race")) == 2
    assert verdicts(copied, "barrier-arrive") == [("caught", "deadlock")]
    assert verdicts(copied, "expect-bytes") == [("caught", "deadlock")]
    assert Counter(verdicts(copied, "store-wait")) == {("caught", "race"): 1, ("caught", "not-waited"): 1}
    assert copied.score("phase") == (2, 2)
    assert copied.score() == (10, 10)


def test_each_use_of_a_function_is_a_fault_of_its_own(copied: MutationReport) -> None:
    waits = [outcome for outcome in copied.outcomes if outcome.mutation.kind == "barrier-wait"]
    assert sorted(outcome.mutation.name.partition(" <- ")[2] for outcome in waits) == [
        "wait(empty[i % 2], ((i // 2) & 1) ^ 1, i >= 0)",
        "wait(full[i % 2], (i // 2) & 1, i >= 0)",
        "wait(full[i % 2], (i // 2) & 1, twice > 0)",
    ]
    idle = [outcome for outcome in waits if outcome.verdict == "not executed"]
    assert [(outcome.note, "twice" in outcome.mutation.name) for outcome in idle] == [
        ("its predicate is never true", True)
    ]


def test_a_wait_that_another_one_makes_redundant_is_told_apart() -> None:
    report = mutate(lambda: copy(twice=2), copy_kernel, seeds=1, kinds=["barrier-wait"])
    by_use = {o.mutation.name.partition(" <- ")[2]: o for o in report.outcomes}
    second = by_use["wait(full[i % 2], (i // 2) & 1, twice > 0)"]
    assert (second.verdict, second.note.startswith("redundant in this case: the task knows")) == ("redundant", True)
    first = by_use["wait(full[i % 2], (i // 2) & 1, i >= 0)"]
    assert (first.verdict, first.note) == ("survived", "")  # the second does its work
    assert report.score("barrier-wait") == (1, 3)


def test_a_slot_that_is_never_used_again_is_told_apart() -> None:
    report = mutate(lambda: copy(blocks=2), copy_kernel, seeds=1, kinds=["barrier-wait", "barrier-arrive"])
    notes = {o.mutation.name.partition(" <- ")[2]: (o.verdict, o.note) for o in report.survivors}
    assert notes == {
        "wait(empty[i % 2], ((i // 2) & 1) ^ 1, i >= 0)": (
            "redundant",
            "redundant in this case: there is nothing yet to wait for whenever it is executed",
        ),
        "": ("survived", ""),  # the arrival, for which nobody waits
    }


def test_arrivals_of_matmuls_and_commits_are_faults() -> None:
    report = mutate(multiply, multiply_kernel, arch="sm_100", seeds=1)
    assert verdicts(report, "dot-arrive") == [("caught", "deadlock")]
    assert verdicts(report, "commit") == [("caught", "deadlock")]
    # Either of the two last waits does for both, the second also for the first.
    assert Counter(verdicts(report, "barrier-wait"))["caught", "race"] == 1


def test_waits_for_copies_and_meetings_of_a_cluster_are_faults() -> None:
    report = mutate(exchange, exchange_kernel, seeds=1)
    assert report.survivors == []
    assert report.scores() == {"copy-wait": (1, 1), "copy-pending": (1, 1), "cluster-barrier": (1, 1)}
    assert {by for _, by in verdicts(report, "cluster-barrier")} <= {"race", "poison"}  # whichever comes first


def test_a_mutant_that_spins_ends() -> None:
    report = mutate(spin, spinning_kernel, seeds=1, kinds=["barrier-arrive", "phase"])
    assert verdicts(report, "barrier-arrive") == [("caught", "endless")]


def test_nothing_is_left_behind(copied: MutationReport) -> None:
    del copied
    assert not [name for name in globals() if name.startswith("__mutation")]
    assert mutate(copy, copy_kernel, seeds=1, kinds=["expect-bytes"]).score() == (1, 1)


def test_a_kernel_that_fails_unchanged_is_refused() -> None:
    with pytest.raises(BaselineError, match=r"the unchanged kernel fails, seed=0, policy='random': wrong-result"):
        mutate(lambda: False, copy_kernel, seeds=1)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="kinds: wait not among barrier-wait, phase"):
        mutations(copy_kernel, ["wait"])


def test_the_report_tells_scores_survivors_and_where_they_are() -> None:
    report = mutate(lambda: copy(blocks=2), copy_kernel, seeds=1)
    text = str(report)
    assert text.startswith(
        "copy_kernel (simulated sm_90): 8 of 10 mutations caught (80%), each under up to 3 schedules"
    )
    line = next(mutation.line for mutation in mutations(copy_kernel) if mutation.kind == "barrier-arrive")
    assert f"  barrier-arrive in copy_kernel: tlx.barrier_arrive(empty[i % 2], 1)  (test_mutate.py:{line})" in text
    data: dict[str, Any] = json.loads(report.to_json())
    assert data["simulated"] is True
    assert data["scores"]["barrier-arrive"] == {"caught": 0, "executed": 1}
    assert {mutation["kind"] for mutation in data["mutations"]} <= set(KINDS)
    caught = next(mutation for mutation in data["mutations"] if mutation["verdict"] == "caught")
    assert caught["message"]
    assert (caught["file"], caught["calls"]) != ("", None)


def test_our_forward_kernel() -> None:
    report = mutate_attention(Case((150, 0, 40, 20, 10), 64, head_dim=64), seeds=1)
    assert report.score("phase") == (9, 9), report
    assert report.score("dot-wait", "dot-pending") == (10, 10), report
    assert report.score("barrier-wait") == (9, 9), report
    assert not any(outcome.by == "error" for outcome in report.outcomes), report


@pytest.mark.parametrize(("least", "code"), [("0.8", 0), ("0.81", 1)])
def test_the_command_fails_under_a_share(
    least: str, code: int, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    target = f"{__file__}:short_copy"
    arguments = ["--kernel", f"{__file__}:copy_kernel", "--seeds", "1", "--fail-under", least]
    assert main(["mutate", target, *arguments, "--json", str(tmp_path / "report.json")]) == code
    assert "8 of 10 mutations caught" in capsys.readouterr().out
    assert json.loads((tmp_path / "report.json").read_text())["kernel"] == "copy_kernel"


def short_copy() -> None:
    copy(blocks=2)


def test_the_command_asks_for_the_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mutate", f"{__file__}:short_copy"]) == 2
    assert "which of the kernels that it launches? Say so: --kernel" in capsys.readouterr().err


def test_the_command_knows_our_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mutate", "kernels.attention.fwd_sm70"]) == 2
    assert "expected one of kernels.attention.fwd_sm90" in capsys.readouterr().err
