"""The forward kernel for Blackwell beside the one among TLX's tutorials, compiled for sm_100a and simulated.

    python scripts/compare_forward_sm100.py

Both have tiles of 256 queries, blocks of 128 keys, and D = 128 in bfloat16, without a mask. Prints a Markdown table:
what the assembler says, how many instructions of a kind are in the code, and how often the roles of a CTA wait for a
barrier, by counting on the simulator. Needs no GPU, and says nothing of speed.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
import triton.language.extra.tlx as tlx
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from jfabench import sass, sim
from jfabench.kernels import jagged_flash_attention
from jfabench.kernels.attention import offline
from jfabench.kernels.attention.config_sm100 import WIDE
from jfabench.sim import fakes
from jfabench.sim.attention import attention_on
from jfabench.sim.builder import Builder
from jfabench.sim.host import simulated_gpu

TUTORIAL = Path(tlx.__file__).parent / "tutorials" / "blackwell_fa_ws_pipelined_persistent.py"
SETTINGS = {
    "HEAD_DIM": 128,
    "BLOCK_M": 256,
    "BLOCK_N": 128,
    "STAGE": 1,
    "NUM_BUFFERS_Q": 1,
    "NUM_BUFFERS_KV": 3,
    "NUM_BUFFERS_QK": 1,
    "NUM_MMA_GROUPS": 2,
    "NUM_MMA_SLICES": 2,
    "GROUP_SIZE_N": 1,
    "RESCALE_OPT": True,
    "USE_WHERE": False,
    "USE_WARP_BARRIER": True,
}
SCALE = 128**-0.5


def tutorial_kernel() -> Any:
    """The tutorial asks for a driver when it is imported."""
    spec = importlib.util.spec_from_file_location("tlx_tutorial", TUTORIAL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["tlx_tutorial"] = module
    with fakes.driver(100):
        spec.loader.exec_module(module)
    return module._attn_fwd_ws.fn


def compiled_tutorial(kernel: Any) -> offline.Binary:
    block = "tensordesc<bf16[128,128]>"
    types = {"sm_scale": "fp32", "M": "*fp32", "Z": "i32", "H": "i32", "N_CTX": "i32"}
    types |= {f"desc_{name}": block for name in "qkvo"}
    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    constants: dict[tuple[int, ...], Any] = {(names.index(name),): value for name, value in SETTINGS.items()}
    source = ASTSource(kernel, signature, constants, {(names.index("M"),): [["tt.divisibility", 16]]})
    options = {"num_warps": 4, "num_stages": 1}
    built = triton.compile(source, target=GPUTarget("cuda", 100, 32), options=options)
    return offline.Binary(built.asm["ptx"], built.asm["cubin"], built.metadata.shared, built.metadata.tmem_size)


def compiled_ours(**changes: Any) -> offline.Binary:
    with mock.patch.object(offline.config_sm100, "candidates", return_value=(replace(WIDE, **changes),)):
        launches = offline.launches("sm100", "forward", 100)
        return offline.compile_launch(next(launch for launch in launches if launch.role), 100)


def figures(binary: offline.Binary) -> dict[str, int]:
    said = sass.parse_assembler(offline.assembler_report(binary.ptx, 100))
    (whole,) = sass.mixes(offline.disassembly(binary.cubin), [])
    return {
        "registers at launch": said.registers,
        "bytes of spill stores": said.spill_store_bytes,
        "bytes of spill loads": said.spill_load_bytes,
        "bytes of shared memory": binary.shared_bytes,
        "columns of tensor memory": binary.tmem_columns,
        "instructions": whole.counts["instructions"],
        "tensor instructions": whole.counts["tensor"],
        "exponentials": whole.counts["exp2"],
        "barrier waits in the code": whole.counts["mbarrier_try"] // 2,  # the first try, and the loop that repeats it
        "barriers of a warp group": whole.counts["barrier_sync"],
    }


def waits(run: Callable[[int], object], keys: int) -> int:
    """How many times the roles of a CTA wait for a barrier in a tile with so many keys."""
    count = 0
    wait = Builder.create_barrier_wait

    def counted(*args: Any) -> Any:
        nonlocal count
        count += 1
        return wait(*args)

    with mock.patch.object(Builder, "create_barrier_wait", counted):
        run(keys)
    return count


def run_tutorial(kernel: Any, keys: int) -> None:
    """One tile: the tutorial has as many queries as keys, of which the others are not asked for."""
    q, k, v, out = (torch.zeros(keys, 128, dtype=torch.bfloat16) for _ in range(4))
    blocks = [TensorDescriptor(x, list(x.shape), list(x.stride()), [128, 128]) for x in (q, k, v, out)]
    statistics = torch.zeros(keys)
    sim.launch(kernel, (1,), SCALE, statistics, 1, 1, *blocks, keys, **SETTINGS, num_warps=4, arch="sm_100")


def run_ours(keys: int, **changes: Any) -> None:
    q, k, v = (torch.zeros(rows, 1, 128, dtype=torch.bfloat16) for rows in (256, keys, keys))
    config = replace(WIDE, **changes)
    with simulated_gpu("sm_100"), attention_on("sm_100", multiprocessors=1, choose=lambda *_: config):
        jagged_flash_attention(q, k, v, torch.tensor([0, keys]), broadcast_q=True)


def per_tile(run: Callable[[int], object]) -> dict[str, int]:
    """A tile of four blocks of keys takes so much more than one of two."""
    two, four = waits(run, 256), waits(run, 512)
    step = (four - two) // 2
    return {"barrier waits of a step": step, "barrier waits of a tile beside them": two - 2 * step}


def main() -> None:
    kernel = tutorial_kernel()
    variants: dict[str, dict[str, Any]] = {"zigzag": {}, "on demand": {"order": "clc"}}
    theirs = per_tile(lambda n: run_tutorial(kernel, n))
    columns = {"tutorial, on demand": {**figures(compiled_tutorial(kernel)), **theirs}}
    for name, changes in variants.items():
        columns[f"ours, {name}"] = {
            **figures(compiled_ours(**changes)),
            **per_tile(lambda n, changes=changes: run_ours(n, **changes)),  # type: ignore[misc]
        }
    print("| | " + " | ".join(columns) + " |")
    print("|---|" + "---|" * len(columns))
    for row in next(iter(columns.values())):
        print(f"| {row} | " + " | ".join(str(column[row]) for column in columns.values()) + " |")


if __name__ == "__main__":
    main()
