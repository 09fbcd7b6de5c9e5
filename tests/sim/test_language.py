"""That rewritten code means what Triton's compiler takes it to mean."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from jfabench.sim import KernelError, launch, simulate, simulate_calls, simulated_gpu


@triton.jit
def _total(x, y):
    return x * 2 + y


@triton.jit
def _larger(x, y):
    return tl.maximum(x, y)


@triton.jit
def _choose(x, limit):
    if x > limit:  # noqa: SIM108  # a branch is meant
        result = limit
    else:
        result = -x
    return result


@triton.jit
def scalar_kernel(out, n, HOW: tl.constexpr):
    if HOW == "division":  # towards zero, as on a GPU
        tl.store(out, n // 4)
        tl.store(out + 1, n % 4)
    elif HOW == "overflow":
        tl.store(out, (n + 2147483647).to(tl.int64))
    elif HOW == "loop":
        total = 0
        for i in range(2, n, 3):
            total += i
        while total > 10:
            total -= 10
        tl.store(out, total)
    elif HOW == "logic":
        tl.store(out, 1 if n > 3 and not (n == 7 or n < 0) else 0)
        tl.store(out + 1, min(n, 5) + max(2, 3))
    elif HOW == "constants":
        SIZE: tl.constexpr = tl.cdiv(100, 8) * 2
        block = tl.zeros([16], tl.int32) + SIZE
        tl.store(out, tl.sum(block))
    elif HOW == "constant of a value":
        WRONG: tl.constexpr = n + 1
        tl.store(out, WRONG)
    elif HOW == "truth of a block":  # noqa: SIM102
        if tl.arange(0, 16) > 3:
            tl.store(out, 1)


@pytest.mark.parametrize(
    ("how", "n", "expected"),
    [
        ("division", -7, [-1, -3]),
        ("overflow", 2, [1 - 2**31]),
        ("loop", 12, [6]),
        ("logic", 5, [1, 8]),
        ("logic", 7, [0, 8]),
        ("constants", 0, [416]),
    ],
)
def test_scalars(how: str, n: int, expected: list[int]) -> None:
    out = torch.zeros(2, dtype=torch.int64)
    assert launch(scalar_kernel, (1,), out, n, how).ok
    assert out.tolist()[: len(expected)] == expected


@pytest.mark.parametrize(
    ("how", "message"), [("constant of a value", "WRONG is annotated"), ("truth of a block", "has no truth value")]
)
def test_what_no_compiler_accepts(how: str, message: str) -> None:
    with pytest.raises(KernelError, match=rf"(?s){message}.*test_language.py:\d+ in scalar_kernel"):
        launch(scalar_kernel, (1,), torch.zeros(2, dtype=torch.int64), 3, how)


@triton.jit
def block_kernel(x, out, HOW: tl.constexpr):
    rows, columns = tl.arange(0, 8)[:, None], tl.arange(0, 16)[None, :]
    place = rows * 16 + columns
    a = tl.load(x + place)
    if HOW == "sum":
        tl.store(out + tl.arange(0, 8), tl.sum(a, 1))
    elif HOW == "max":
        tl.store(out + tl.arange(0, 16), tl.max(a, 0))
    elif HOW == "argmax":
        tl.store(out + tl.arange(0, 8), tl.argmax(a, 1).to(tl.float32))
    elif HOW == "custom":
        tl.store(out + tl.arange(0, 8), tl.reduce(a, 1, _larger))
    elif HOW == "cumsum":
        tl.store(out + place, tl.cumsum(a, 1))
    elif HOW == "scan":
        tl.store(out + place, tl.associative_scan(a, 0, _larger, reverse=True))
    elif HOW == "elementwise":
        tl.store(out + place, tl.map_elementwise(_choose, a, tl.full([8, 16], 0.5, tl.float32)))
    elif HOW == "split":
        even, odd = tl.split(tl.reshape(a, [8, 8, 2]))
        tl.store(out + place, tl.reshape(tl.join(odd, even), [8, 16]))
    elif HOW == "trans":
        tl.store(out + tl.arange(0, 16)[:, None] * 8 + tl.arange(0, 8)[None, :], a.T)
    elif HOW == "bfloat16":
        b = a.to(tl.bfloat16)
        tl.store(out + place, (b + b * b).to(tl.float32))
    elif HOW == "dot":
        product = tl.dot(tl.trans(a).to(tl.float16), a.to(tl.float16))
        tl.store(out + tl.arange(0, 16)[:, None] * 16 + columns, product)


EXPECTED = {
    "sum": lambda a: a.sum(1),
    "max": lambda a: a.max(0).values,
    "argmax": lambda a: a.argmax(1).float(),
    "custom": lambda a: a.max(1).values,
    "cumsum": lambda a: a.cumsum(1),
    "scan": lambda a: a.flip(0).cummax(0).values.flip(0),
    "elementwise": lambda a: torch.where(a > 0.5, 0.5, -a),
    "split": lambda a: a.reshape(8, 8, 2).flip(2).reshape(8, 16),
    "trans": lambda a: a.T,
    "bfloat16": lambda a: (a.bfloat16() + a.bfloat16() * a.bfloat16()).float(),
    "dot": lambda a: a.T.half().float() @ a.half().float(),
}


@pytest.mark.parametrize("how", EXPECTED)
def test_blocks(how: str) -> None:
    a, out = torch.randn(8, 16), torch.zeros(16 * 16)
    assert launch(block_kernel, (1,), a, out, how).ok
    expected = EXPECTED[how](a).flatten()
    torch.testing.assert_close(out[: len(expected)], expected)


@triton.jit
def captured_kernel(out):
    """Names of the kernel that tasks change are each task's own."""
    count = 3
    bars = tlx.alloc_barriers(num_barriers=2, arrive_count=1)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            count += 1
            for i in tl.static_range(2):
                tlx.barrier_wait(bars[i], 0)
            tl.store(out, count)
        with tlx.async_task(num_warps=4, replicate=2):
            count += 10
            mine = tlx.async_task_replica_id()
            tl.store(out + 1 + mine, count + mine)
            tlx.barrier_arrive(bars[mine], 1)
    tl.store(out + 3, count)


@pytest.mark.parametrize("policy", ["random", "early", "late"])
def test_tasks_have_names_of_their_own(policy: str) -> None:
    out = torch.zeros(4, dtype=torch.int32)
    run = launch(captured_kernel, (1,), out, policy=policy)  # type: ignore[arg-type]
    assert run.ok
    assert out.tolist() == [4, 13, 14, 3]
    assert [(use.name, use.phases) for use in run.barriers] == [("bars[0]", 1), ("bars[1]", 1)]


@triton.autotune(configs=[triton.Config({"BLOCK": 64}), triton.Config({"BLOCK": 128})], key=["n"])
@triton.jit
def tuned_kernel(out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, BLOCK, mask=i < n)


@pytest.mark.parametrize("config", [0, 1])
def test_host_code_and_autotuners(config: int) -> None:
    out = torch.zeros(200, dtype=torch.int32)
    with simulated_gpu("sm_90", config=config) as gpu:
        tuned_kernel[lambda meta: (triton.cdiv(200, meta["BLOCK"]),)](out, 200)
        assert torch.cuda.get_device_capability() == (9, 0)
    assert [run.kernel for run in gpu.runs] == ["tuned_kernel"]
    assert gpu.ok
    assert (out == (64, 128)[config]).all()


@triton.jit
def sort_kernel(x, out):
    """Triton's library adds a list to a tuple."""
    i = tl.arange(0, 32)
    tl.store(out + i, tl.sort(tl.load(x + i)))


def test_a_function_of_the_library() -> None:
    x, out = torch.randn(32), torch.zeros(32)
    assert launch(sort_kernel, (1,), x, out).ok
    assert torch.equal(out, x.sort().values)


@triton.jit
def unsupported_kernel(out, HOW: tl.constexpr):
    i = tl.arange(0, 32)
    if HOW == "dot_scaled":
        block, scales = tl.zeros((32, 32), tl.float8e4nv), tl.zeros((32, 1), tl.uint8)
        tl.dot_scaled(block, scales, "e4m3", block, scales, "e4m3")
    elif HOW == "lane":
        tl.inline_asm_elementwise("mov.u32 $0, %laneid;", "=r,r", [i], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def with_kernel(out):
    with out:
        tl.store(out, 1)


@pytest.mark.parametrize(
    ("kernel", "arguments", "options", "message"),
    [
        (unsupported_kernel, ("dot_scaled",), {}, "tl.dot_scaled cannot be simulated"),
        (unsupported_kernel, ("lane",), {}, "inline PTX: the operand %laneid cannot be simulated"),
        (unsupported_kernel, ("",), {"num_warp": 8}, "unsupported_kernel has no argument num_warp"),
        (with_kernel, (), {}, "`with out` at line"),
    ],
)
def test_what_cannot_be_carried_out(kernel, arguments, options, message) -> None:
    with pytest.raises(KernelError, match=message):
        launch(kernel, (1,), torch.zeros(1), *arguments, **options)


def test_tensors_that_are_elsewhere() -> None:
    with pytest.raises(KernelError, match="out: expected a tensor on the CPU, got one on meta"):
        launch(with_kernel, (1,), torch.zeros(1, device="meta"))


def test_no_schedules_find_nothing() -> None:
    with pytest.raises(ValueError, match="expected at least one of each"):
        simulate(sort_kernel, (1,), (torch.zeros(32), torch.zeros(32)), seeds=0)
    with pytest.raises(ValueError, match="expected at least one of each"):
        simulate_calls(lambda: None, policies=())


def test_one_policy_by_its_name() -> None:
    report = simulate(sort_kernel, (1,), (torch.zeros(32), torch.zeros(32)), seeds=2, policies="late")
    assert [(run.seed, run.policy) for run in report.runs] == [(0, "late"), (1, "late")]


def test_the_interpreter_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(KernelError, match="unset TRITON_INTERPRET"), simulated_gpu():
        pass
