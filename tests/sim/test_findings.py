"""Each kind of finding, by a kernel that is wrong in one place; and that the right kernels have none."""

from __future__ import annotations

import json

import faults
import pytest
import torch
from triton.tools.ragged_tma import create_ragged_descriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from jfabench.sim import KernelError, Report, launch, simulate

BLOCKS = 5


def blocks(tensor: torch.Tensor) -> TensorDescriptor:
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [64, 64])


def copied(fault: str) -> Report:
    source = torch.randn(64 * BLOCKS, 64).half()
    target = torch.zeros_like(source)

    def check() -> None:
        torch.testing.assert_close(target, source, atol=0, rtol=0)

    return simulate(faults.copy_kernel, (1,), (blocks(source), blocks(target), BLOCKS, fault), seeds=4, check=check)


def kinds(report: Report) -> set[str]:
    return {finding.kind for finding in report.findings}


def test_the_right_kernel_has_no_findings() -> None:
    report = copied("")
    assert report.ok, str(report)
    assert [(use.name, use.phases) for use in report.runs[0].barriers] == [
        ("full[0]", 3),
        ("full[1]", 2),
        ("empty[0]", 3),
        ("empty[1]", 2),
    ]
    assert report.runs[0].smem_bytes == 3 * 8192 + 4 * 8


@pytest.mark.parametrize(
    ("fault", "kind", "line"),
    [
        ("no wait for a free buffer", "race", "async_descriptor_load(src"),
        ("no wait for data", "race", "local_load(tiles"),
        ("phase flipped", "race", "local_load(tiles"),
        ("no such buffer", "out-of-bounds", "local_load(tiles"),
        ("released by two arrivals", "over-arrival", "barrier_arrive(empty"),
        ("released twice", "race", "async_descriptor_load(src"),
        ("no wait before the staging buffer is used again", "race", "async_descriptor_store(dst"),
        ("staging buffer not written", "poison", "async_descriptor_store(dst"),
        ("no wait before the end", "not-waited", "async_descriptor_store(dst"),
        ("too much shared memory", "capacity", "local_alloc((256, 256)"),
    ],
)
def test_a_fault_is_found_at_its_line(fault: str, kind: str, line: str) -> None:
    report = copied(fault)
    found = [finding for finding in report.findings if finding.kind == kind]
    assert any(line in place.code for finding in found for place in finding.places), str(report)


@pytest.mark.parametrize(
    ("fault", "barrier", "state"),
    [
        ("buffer not released", "empty[0]", "1 of 1 arrivals pending"),
        ("too many bytes expected", "full[0]", "128 bytes to come"),
    ],
)
def test_a_deadlock_names_the_barrier_and_what_it_lacks(fault: str, barrier: str, state: str) -> None:
    (finding,) = [finding for finding in copied(fault).findings if finding.kind == "deadlock"]
    assert f"barrier {barrier}" in finding.message
    assert state in finding.message
    assert "faults.py:" in finding.message


def test_a_descriptor_larger_than_its_tensor() -> None:
    source = torch.zeros(64, 64).half()
    wrong = TensorDescriptor(source, [64 * BLOCKS, 64], [64, 1], [64, 64])
    run = launch(faults.copy_kernel, (1,), wrong, blocks(torch.zeros(64 * BLOCKS, 64).half()), BLOCKS, "")
    (finding,) = run.findings
    assert finding.kind == "out-of-bounds"
    assert "reaches beyond" in finding.message
    assert finding.places[0].code.startswith("tlx.async_descriptor_load")


def test_a_descriptor_whose_strides_wrap_around() -> None:
    """16 rows from row 8 on, bounded by the extent of a descriptor whose addresses wrap around at 2^64."""
    source = torch.randn(64, 64).half()
    target = torch.zeros(64, 64).half()
    ragged = create_ragged_descriptor(source, [64, 64])
    run = launch(faults.ragged_kernel, (1,), ragged, target, 8, 16)
    assert run.ok, str(run)
    assert torch.equal(target[:16], source[8:24])
    assert not target[16:].any()


def test_bytes_that_nobody_expected() -> None:
    report = copied("bytes not expected")
    assert {"expect", "race"} & kinds(report), str(report)


def test_findings_are_reproducible() -> None:
    def run(seed: int) -> str:
        source = torch.zeros(64 * BLOCKS, 64).half()
        args = (blocks(source), blocks(torch.zeros_like(source)), BLOCKS, "no wait for data")
        return "\n".join(map(str, launch(faults.copy_kernel, (1,), *args, seed=seed).findings))

    assert run(3) == run(3)


@pytest.mark.parametrize("fence", [True, False])
def test_a_store_through_the_window_needs_a_fence(fence: bool) -> None:
    report = simulate(faults.window_kernel, (1,), (blocks(torch.zeros(64, 64).half()), fence))
    assert kinds(report) == (set() if fence else {"proxy-fence"})


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("", set()),
        ("result not waited for", {"poison", "not-waited"}),
        ("result not used", set()),
        ("operand overwritten", {"race"}),
    ],
)
def test_wgmma(fault: str, expected: set[str]) -> None:
    a, b = torch.randn(64, 64).half(), torch.randn(64, 64).half()
    out = torch.zeros(64, 64)

    def check() -> None:
        if fault != "result not used":
            torch.testing.assert_close(out, a.float() @ b.float(), atol=1e-3, rtol=1e-3)

    report = simulate(faults.matmul_kernel, (1,), (blocks(a), blocks(b), out, fault), check=check)
    assert kinds(report) - {"wrong-result"} == expected, str(report)


def test_a_missed_phase() -> None:
    report = simulate(faults.missed_kernel, (1,), (torch.zeros(1),), seeds=8)
    phase = next(finding for finding in report.findings if finding.kind == "phase")
    assert phase.places[0].code == "tlx.barrier_wait(bar[0], 0)"


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("stores", {"race"}),
        ("equal stores", set()),
        ("atomics", set()),
        ("a flag", set()),
        ("out of bounds", {"out-of-bounds"}),
    ],
)
def test_global_memory(how: str, expected: set[str]) -> None:
    report = simulate(faults.global_kernel, (2,), (torch.zeros(1), torch.zeros(1, dtype=torch.int32), how))
    assert kinds(report) == expected, str(report)


def test_a_loop_that_spins() -> None:
    counter = torch.zeros(1, dtype=torch.int32)
    run = launch(faults.global_kernel, (1,), torch.zeros(1), counter, "spinning", max_steps=500)
    assert [finding.kind for finding in run.findings] == ["endless"]


def test_a_loop_that_spins_without_simulating_anything() -> None:
    run = launch(faults.global_kernel, (1,), torch.zeros(1), torch.zeros(1), "spinning on a number", max_steps=500)
    (finding,) = run.findings
    assert finding.kind == "endless"
    assert finding.places[0].code == "while me == 0:"


@pytest.mark.parametrize("read", [False, True])
def test_reductions_do_not_race_but_reading_their_sum_does(read: bool) -> None:
    out, sink = torch.zeros(64, 64), torch.zeros(3, 64, 64)
    report = simulate(faults.reduction_kernel, (3,), (blocks(out), read, sink))
    assert kinds(report) == ({"race"} if read else set())
    assert torch.equal(out, torch.full((64, 64), 3.0))


@pytest.mark.parametrize(
    ("fault", "expected"), [("", set()), ("no wait", {"race"}), ("too much tensor memory", {"capacity"})]
)
def test_tensor_memory(fault: str, expected: set[str]) -> None:
    out = torch.zeros(128, 64)
    report = simulate(faults.tensor_memory_kernel, (1,), (out, fault), arch="sm_100")
    assert kinds(report) - {"poison"} == expected, str(report)
    assert report.runs[0].tmem_columns == (64 if "too much" not in fault else 0)


def test_tensor_memory_is_not_there_on_hopper() -> None:
    with pytest.raises(KernelError, match="only available on Blackwell"):
        launch(faults.tensor_memory_kernel, (1,), torch.zeros(128, 64), "", arch="sm_90")


def test_a_wrong_result_is_a_finding() -> None:
    out = torch.zeros(1)
    report = simulate(faults.global_kernel, (1,), (out, None, "equal stores"), check=lambda: bool(out[0] == 2))
    assert kinds(report) == {"wrong-result"}
    with pytest.raises(AssertionError, match="the check returned False"):
        report.require_ok()


def test_the_report_as_json() -> None:
    data = json.loads(copied("no wait for data").to_json())
    assert data["simulated"] is True
    assert data["ok"] is False
    (race,) = [finding for finding in data["findings"] if finding["kind"] == "race"][:1]
    assert race["places"][0]["frames"][0][0].endswith("faults.py")
    assert {run["policy"] for run in data["runs"]} == {"random", "early", "late"}


def test_an_allocation_that_begins_with_a_smaller_one_overlaps_nothing_else() -> None:
    out = torch.zeros(2, 64)
    report = simulate(faults.alias_kernel, (1,), (out,), check=lambda: out.tolist() == [[3.0] * 64, [2.0] * 64])
    assert report.ok, str(report)
    assert report.runs[0].smem_bytes == 4 * 256 + 256
