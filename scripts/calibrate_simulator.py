"""Is the simulator right? The same kernels on the same inputs, on an H200 and simulated, and faults put in on purpose.

    python scripts/calibrate_simulator.py record calibration.npz      # on a GPU of sm_90
    python scripts/calibrate_simulator.py compare calibration.npz     # anywhere: simulates, and compares

`record` writes the results of the kernels, and what each fault did: `hang`, `wrong`, `right`, or an
error of the GPU. `compare` prints how
far the simulated results are from those, in roundings of the results' type, and what the simulator says of each fault.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton.language.extra.tlx as tlx
from torch import Tensor

from jfabench.kernels import jagged_flash_attention
from jfabench.kernels.attention import launch_sm90

Results = dict[str, np.ndarray]

TUTORIALS = Path(os.environ.get("TLX_TUTORIALS", Path(tlx.__file__).parent / "tutorials"))
PATIENCE = 25  # seconds after which a kernel with a fault counts as hanging; compiling it takes a few

# Problems -------------------------------------------------------------------------------------------------------------


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The same on every machine."""
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)).to(dtype)


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def attend(device: str, m: int | None, lengths: list[int], dim: int, window: tuple[int, int]) -> Results:
    """`out` and the gradients of the public function: `m` queries shared by all sequences, or packed ones."""
    keys = sum(lengths)
    inputs = (normal(seed, rows, 1, dim) for seed, rows in enumerate((m or keys, keys, keys)))
    q, k, v = (value.to(device).requires_grad_() for value in inputs)
    ends = offsets(lengths).to(device)
    out = jagged_flash_attention(
        q,
        k,
        v,
        ends,
        q_offsets=None if m else ends,
        broadcast_q=m is not None,
        window=window,
        kernels="tlx",
    )
    dout = normal(3, *out.shape).to(device)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    return {"out": plain(out), "dq": plain(dq), "dk": plain(dk), "dv": plain(dv)}


def tutorial(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"tutorial_{name}", TUTORIALS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def tutorial_attention(device: str) -> Results:
    config = {"BLOCK_M": 128, "BLOCK_N": 128, "NUM_BUFFERS": 2, "NUM_MMA_WARPS": 8, "NUM_MMA_GROUPS": 2}
    q, k, v = (normal(seed, 1, 1, 256, 128, dtype=torch.float16).to(device) for seed in range(3))
    return {"out": plain(tutorial("hopper_fa_ws_pipelined_pingpong").attention(q, k, v, 0.1, config=config))}


def tutorial_gemm(device: str) -> Results:
    config = {"BM": 128, "BN": 256, "BK": 64, "GROUP_SIZE_M": 8, "NUM_STAGES": 3, "NUM_MMA_WARPS": 8}
    config |= {"NUM_MMA_GROUPS": 2, "EPILOGUE_SUBTILE": False, "NUM_CTAS": 1}
    a, b = (normal(seed, *shape, dtype=torch.float16).to(device) for seed, shape in ((0, (128, 256)), (1, (256, 256))))
    return {"out": plain(tutorial("hopper_gemm_ws").matmul(a, b, config=config))}


def plain(value: Tensor) -> np.ndarray:
    return value.detach().float().cpu().numpy()


PROBLEMS = {
    "tlx_jfa broadcast": lambda device: attend(device, 64, [70, 0, 300, 129, 1], 128, (-1, -1)),
    "tlx_jfa packed, window": lambda device: attend(device, None, [70, 0, 129, 1], 64, (40, 0)),
    "tutorial hopper_fa_ws_pipelined_pingpong": tutorial_attention,
    "tutorial hopper_gemm_ws": tutorial_gemm,
}

# Faults ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """A line of the forward kernel that is left out."""

    what: str
    line: str


FAULTS = {
    "no wait for keys": Fault("the scores are computed before K has landed", "    buffers.k.wait(step, watch)\n"),
    "no release of values": Fault("the loader waits for ever", "    buffers.v.release(step - 1)\n"),
    "no acquiring of keys": Fault("K is overwritten while it is read", "            buffers.k.acquire(steps, watch)\n"),
}
# Several tiles a program, each of more blocks of keys than there are slots.
FAULTY_LENGTHS = [1500, 1300] * 80


@contextlib.contextmanager
def with_fault(fault: Fault) -> Iterator[Path]:
    """The forward kernel without one of its lines, as the file that is yielded."""
    original = Path(str(launch_sm90.forward_sm90_kernel.fn.__code__.co_filename))
    source = original.read_text()
    if source.count(fault.line) != 1:
        raise ValueError(f"{original.name} has {source.count(fault.line)} lines {fault.line.strip()!r}, not one")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / original.name
        path.write_text(source.replace(fault.line, fault.line.split("b")[0] + "pass\n"))
        name = f"{launch_sm90.__package__}.faulty"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        with mock.patch.object(launch_sm90, "forward_sm90_kernel", module.forward_sm90_kernel):
            yield path


def outputs(device: str, lengths: list[int]) -> np.ndarray:
    keys = sum(lengths)
    q, k, v = (normal(seed, rows, 2, 128).to(device) for seed, rows in enumerate((256, keys, keys)))
    with torch.no_grad():
        ends = offsets(lengths).to(device)
        return plain(jagged_flash_attention(q, k, v, ends, broadcast_q=True, kernels="tlx"))


def try_fault(name: str) -> None:
    """Run in a process of its own, which may hang. Prints `right` or `wrong`."""
    right = outputs("cuda", FAULTY_LENGTHS)
    with with_fault(FAULTS[name]):
        results = [outputs("cuda", FAULTY_LENGTHS) for _ in range(3)]
    print("right" if all(np.allclose(result, right, atol=2e-2) for result in results) else "wrong")


def effect(name: str) -> str:
    command = [sys.executable, __file__, "try", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    except subprocess.TimeoutExpired:
        return "hang"
    error = re.search(r"CUDA error: .*", done.stderr)
    return done.stdout.strip() or (error.group() if error else f"failed: {done.stderr.strip()[-300:]}")


# Both ways ------------------------------------------------------------------------------------------------------------


def record(path: Path) -> None:
    found = {f"{name}/{tensor}": value for name, run in PROBLEMS.items() for tensor, value in run("cuda").items()}
    effects = {name: effect(name) for name in FAULTS}
    told = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "effects": effects}
    print(json.dumps(told, indent=1))
    # The results are of 16-bit types: bfloat16 has fewer digits than float16, but a larger range than is used here.
    np.savez_compressed(path, told=np.array(json.dumps(told)), **{k: v.astype(np.float16) for k, v in found.items()})


def simulated(run: Any, seed: int = 0, policy: Any = "random") -> tuple[Results, list[Any]]:
    from jfabench.sim.attention import attention_on
    from jfabench.sim.host import simulated_gpu

    with simulated_gpu("sm_90", seed, policy) as simulation, attention_on("sm_90"):
        results = run("cpu")
    return results, [finding for one in simulation.runs for finding in one.findings]


def compare(recorded: Mapping[str, np.ndarray], seeds: int = 1) -> bool:
    """Prints what was found; whether all agrees."""
    told = json.loads(str(recorded["told"]))
    print(f"recorded on {told['device']}, torch {told['torch']}")
    agrees = True
    for name, run in PROBLEMS.items():
        for seed in range(seeds):
            results, findings = simulated(run, seed)
            agrees &= not findings
            for tensor, value in results.items():
                expected = recorded[f"{name}/{tensor}"].astype(np.float32)
                difference = np.abs(value - expected).max() / np.abs(expected).max()
                agrees &= bool(difference <= 2**-7)
                print(f"{name:42} {tensor:4} largest difference {difference:.1e} of the largest value", *findings)
    for name, fault in FAULTS.items():
        with with_fault(fault):
            _, findings = simulated(lambda device: {"out": outputs(device, [700, 600, 500, 400])})
        agrees &= bool(findings) and told["effects"][name] != "right"
        print(f"\n{name}: {fault.what}. On the GPU: {told['effects'][name]}. Simulated: {len(findings)} findings")
        print(*findings[:1], sep="\n")
    return agrees


def main() -> None:
    parser = argparse.ArgumentParser(description="Compares the simulator with a GPU.")
    parser.add_argument("action", choices=("record", "compare", "try"))
    parser.add_argument("what", help="the file; for `try` the name of a fault")
    arguments = parser.parse_args()
    os.environ["JFABENCH_TUNE"] = "0"
    if arguments.action == "record":
        record(Path(arguments.what))
    elif arguments.action == "try":
        try_fault(arguments.what)
    else:
        with np.load(arguments.what) as recorded:
            sys.exit(0 if compare(recorded) else 1)


if __name__ == "__main__":
    main()
