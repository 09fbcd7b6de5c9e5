"""What CI cannot see: are the kernels right on this GPU?

    python scripts/check_gpu.py [--cases 400] [--shards N] [--only gpu|values|random|repeat|memcheck] [--logs DIR]

- `gpu`: memory, graph capture, addresses beyond 32 bits, bounded tuning, no waiting for the device;
- `values`: the public function's contract, by the tests that CI runs interpreted;
- `random`: random problems, shared out among processes, since most of the time goes to compilers;
- `repeat`: one jagged problem a thousand times: no hang, and in deterministic mode the same bits;
- `memcheck`: a few random problems under compute-sanitizer, with every tensor in memory of its own.

Each goes on where another fails. Exit codes: 0 all passed, 1 something did not, 2 the options are wrong, 3 there is no
GPU or, with `--only memcheck`, no compute-sanitizer.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jfabench import command_line

ROOT = Path(__file__).resolve().parent.parent
NUMERICS = "tests/kernels/numerics"
SANITIZER = "compute-sanitizer"
CHECKED = 6  # problems under the sanitizer, which makes each a hundred times slower: the first cover every value
STAGES = ("gpu", "values", "random", "repeat", "memcheck")


@dataclass(frozen=True)
class Process:
    """One process of a stage; its output goes to `<name>.log`."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


def processes(stage: str, cases: int, shards: int) -> list[Process]:
    """What runs at the same time in a stage."""

    def pytest(*words: str) -> tuple[str, ...]:
        return (sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *words)

    random = f"{NUMERICS}/test_attention_random.py"
    if stage == "gpu":
        return [Process("gpu", pytest(f"{NUMERICS}/test_attention_on_gpu.py"))]
    if stage == "values":
        names = ("test_attention_values.py", "test_attention_contract.py", "test_schedule_order.py")
        return [Process("values", pytest(*(f"{NUMERICS}/{name}" for name in names)))]
    if stage == "repeat":
        return [Process("repeat", pytest(f"{random}::test_a_thousand_times_the_same"))]
    only = f"{random}::test_random_problem"
    if stage == "memcheck":
        sanitizer = (SANITIZER, "--tool", "memcheck", "--error-exitcode", "97", "--target-processes", "all")
        alone = {"JFABENCH_RANDOM_CASES": str(CHECKED), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        return [Process("memcheck", sanitizer + pytest(only), alone)]
    shares = min(shards, cases)
    return [
        Process(
            f"random-{share}",
            pytest(only),
            {"JFABENCH_RANDOM_CASES": str(cases), "JFABENCH_RANDOM_SHARD": f"{share}/{shares}"},
        )
        for share in range(shares)
    ]


def ran(started: Sequence[Process], logs: Path) -> list[Process]:
    """Runs them at the same time and returns those that failed."""
    running = []
    for process in started:
        with (logs / f"{process.name}.log").open("wb") as log:
            environment = {**os.environ, **process.environment}
            environment.pop("TRITON_INTERPRET", None)
            running.append(
                subprocess.Popen(process.command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
            )
    codes = [process.wait() for process in running]
    return [process for process, code in zip(started, codes, strict=True) if code]


def main() -> int:
    parser = argparse.ArgumentParser(description="Are the kernels right on this GPU?")
    count = command_line.whole_number(1)
    parser.add_argument("--cases", type=count, default=400, help="random problems (default: %(default)s)")
    parser.add_argument("--shards", type=count, default=os.cpu_count() or 1, help="processes (default: a core each)")
    parser.add_argument("--only", action="append", choices=STAGES, help="a stage (repeatable; default: all)")
    parser.add_argument("--logs", metavar="DIR", help="where the output goes (default: a temporary folder)")
    arguments = parser.parse_args()
    if arguments.logs is not None and not arguments.logs.strip():
        parser.error("--logs needs the name of a folder")
    import torch

    if not torch.cuda.is_available():
        print("check_gpu: needs an NVIDIA GPU; without one, scripts/test.sh checks what can be", file=sys.stderr)
        return 3
    stages = [stage for stage in STAGES if stage in (arguments.only or STAGES)]
    if "memcheck" in stages and shutil.which(SANITIZER) is None:
        print(f"check_gpu: {SANITIZER} is not on the PATH (it comes with the CUDA toolkit)", file=sys.stderr)
        if stages == ["memcheck"]:
            return 3
        stages.remove("memcheck")
    logs = Path(arguments.logs or tempfile.mkdtemp(prefix="jfabench-check-"))
    logs.mkdir(parents=True, exist_ok=True)
    good = True
    for stage in stages:
        began = time.monotonic()
        failed = ran(processes(stage, arguments.cases, arguments.shards), logs)
        where = ", ".join(str(logs / f"{process.name}.log") for process in failed)
        said = f"FAILED, see {where}" if failed else "passed"
        print(f"{stage}: {said} ({time.monotonic() - began:.0f} s)", flush=True)
        good = good and not failed
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
