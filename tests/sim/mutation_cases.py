"""Kernels whose mutation scores are known: ours, and tutorials that come with fbtriton.

Problems are the smallest that execute nearly every line: several tiles for a program, partly filled blocks, sequences
without keys. What does not change from mutant to mutant, the forward pass of a backward kernel, is computed once.

    python tests/sim/mutation_cases.py [NAME ...] [--out DIR]    # prints reports and a table; takes many minutes
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from jfabench.sim.attention import Case
from jfabench.sim.host import simulated_gpu
from jfabench.sim.mutate import MutationReport, Outcome, mutate
from jfabench.sim.mutate_attention import mutate_attention
from jfabench.sim.mutations import KINDS

sys.path.insert(0, str(Path(__file__).parent))
import mutation_survivors as survivors
import tutorials


@dataclass(frozen=True)
class Subject:
    """A kernel and a test of it: ``mutate(**options)`` takes the options of :func:`jfabench.sim.mutate.mutate`."""

    name: str
    mutate: Callable[..., MutationReport]
    explained: dict[str, str] = field(default_factory=dict)  # see `mutation_survivors`

    @property
    def file_name(self) -> str:
        return self.name.replace(" ", "_")

    def explanation(self, outcome: Outcome) -> str:
        """Why nothing catches a mutation; "" if that is not known."""
        text = f"{outcome.mutation.name} {outcome.note}"
        return next((reason for part, reason in self.explained.items() if part in text), "")


# Our kernels ---------------------------------------------------------------------------------------------------------


def our_subject(name: str, direction: str, case: Case, explained: dict[str, str], **config: Any) -> Subject:
    """With the configuration of the kernel that has these values."""

    def choose(_kind: Any, usable: tuple[Any, ...]) -> Any:
        return next(c for c in usable if all(getattr(c, field) == value for field, value in config.items()))

    return Subject(name, functools.partial(mutate_attention, case, direction, "sm_90", choose=choose), explained)


# Tutorials -----------------------------------------------------------------------------------------------------------


def below(limit: float, error: Callable[[], float]) -> bool:
    return error() < limit  # False for NaN


def tutorial(
    name: str, arch: str, file: str, kernel: str, error: Callable[[], float], explained: dict[str, str], **options: Any
) -> Subject:
    capability = int(arch.removeprefix("sm_"))
    options = {"multiprocessors": 1, "kernels": lambda launched: launched == kernel, **options}

    def run(**further: Any) -> MutationReport:
        module = tutorials.module(file, capability)
        subject = getattr(module, kernel)
        if hasattr(module, "_get_num_sms"):
            module._get_num_sms.cache_clear()
        return mutate(functools.partial(below, 1e-2, error), subject, arch=arch, **options, **further)

    return Subject(name, run, explained)


def tutorial_backward(ctas: int, causal: bool, shape: tuple[int, int, int, int], explained: dict[str, str]) -> Subject:
    file, kernel = "blackwell_fa_ws_pipelined_persistent", "_attn_bwd_ws"
    wanted = {"config": lambda config: config.kwargs.get("NUM_CTAS", ctas) == ctas}

    def run(**further: Any) -> MutationReport:
        q, k, v = (tensor.requires_grad_() for tensor in tutorials.inputs(*shape))
        with simulated_gpu("sm_100", **wanted, detect_races=False):
            out = tutorials.module(file, 100).attention(q, k, v, 0.5, causal)
        dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
        exact = [tensor.detach().float().requires_grad_() for tensor in (q, k, v)]
        right = torch.nn.functional.scaled_dot_product_attention(*exact, scale=0.5, is_causal=causal)
        expected = torch.autograd.grad(right, exact, dout.float())

        def test() -> bool:
            found = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
            return max(tutorials.error(a, b) for a, b in zip(found, expected, strict=True)) < 2e-2

        subject = getattr(tutorials.module(file, 100), kernel)
        return mutate(test, subject, arch="sm_100", kernels=lambda launched: launched == kernel, **wanted, **further)

    return Subject(f"{file}, backward, {ctas} CTA{'s' if ctas > 1 else ''}", run, explained)


def tutorial_attention(
    file: str, shape: tuple[int, ...], causal: bool | None, config: dict[str, Any], explained: dict[str, str]
) -> Subject:
    arch = "sm_90" if file.startswith("hopper") else "sm_100"
    kernel = {
        "hopper_fa_ws_pipelined_pingpong": "_attn_fwd_ws_pipelined_pingpong",
        "hopper_fa_ws_pipelined_pingpong_persistent": "_attn_fwd_ws_pipelined_pingpong_persistent",
        "blackwell_fa_clc": "_attn_fwd_clc",
    }.get(file, "_attn_fwd_ws")
    error = functools.partial(tutorials.attention, file, int(arch.removeprefix("sm_")), shape, causal, config)
    return tutorial(file, arch, file, kernel, error, explained)


def tutorial_gemm(
    name: str, kernel: str, config: Any, explained: dict[str, str], shape: tuple[int, int, int] = (512, 512, 256)
) -> Subject:
    file = name.partition(",")[0]
    arch = "sm_90" if file.startswith("hopper") else "sm_100"
    error = functools.partial(tutorials.gemm, file, int(arch.removeprefix("sm_")), shape, config)
    multiprocessors = 2 if config and config.get("NUM_CTAS") == 2 else 1
    return tutorial(name, arch, file, kernel, error, explained, multiprocessors=multiprocessors)


PLAIN = {"RESCALE_OPT": False, "USE_WHERE": False}
TWO_GROUPS = {
    **tutorials.GEMM_WS,
    "BLOCK_SIZE_M": 256,
    "NUM_TMEM_BUFFERS": 1,
    "NUM_MMA_GROUPS": 2,
    "EPILOGUE_SUBTILE": 4,
}
TWO_CTAS = {**tutorials.GEMM_WS, "EPILOGUE_SUBTILE": 4, "NUM_CTAS": 2, "ctas_per_cga": (2, 1, 1)}

MATMUL = "matmul_kernel_tma_ws_blackwell"

SUBJECTS = [
    our_subject(
        "fwd_sm90, broadcast, D=128",
        "fwd",
        Case((400, 0, 100, 60, 30), 128),
        survivors.FORWARD,
        consumers=2,
        block_n=128,
    ),
    our_subject(
        "fwd_sm90, packed, D=64, window",
        "fwd",
        Case((210, 64, 0, 130), head_dim=64, window=(30, 10)),
        survivors.FORWARD,
        consumers=2,
        block_n=64,
    ),
    our_subject(
        "fwd_sm90, packed, D=128, causal",
        "fwd",
        Case((280, 70, 128), causal=True),
        survivors.FORWARD,
        consumers=2,
        block_n=128,
    ),
    our_subject(
        "fwd_sm90, broadcast, D=64, one consumer",
        "fwd",
        Case((200, 150, 37, 20, 0, 30, 10, 5), 64, head_dim=64),
        survivors.FORWARD,
        consumers=1,
    ),
    our_subject(
        "bwd_sm90, broadcast, D=128, late dQ",
        "bwd",
        Case((200, 0, 128), 128, heads=2),
        survivors.BACKWARD_LATE_DQ,
        add_dq=True,
        late_dq=True,
    ),
    our_subject(
        "bwd_sm90, packed, D=64, late dQ",
        "bwd",
        Case((300, 0, 128, 100, 70, 20), head_dim=64),
        survivors.BACKWARD_LATE_DQ,
        add_dq=True,
        late_dq=True,
    ),
    our_subject(
        "bwd_sm90, packed, D=128, window, late dQ",
        "bwd",
        Case((200, 128, 60, 50), window=(60, 20)),
        survivors.BACKWARD_LATE_DQ,
        add_dq=True,
        late_dq=True,
    ),
    our_subject(
        "bwd_sm90, packed, D=64, prompt dQ",
        "bwd",
        Case((300, 0, 128, 100, 70, 20), head_dim=64),
        survivors.BACKWARD_PROMPT_DQ,
        add_dq=True,
        late_dq=False,
    ),
    our_subject(
        "bwd_sm90, packed, D=128, window, prompt dQ",
        "bwd",
        Case((200, 128, 60, 50), window=(60, 20)),
        survivors.BACKWARD_PROMPT_DQ,
        add_dq=True,
        late_dq=False,
    ),
    our_subject(
        "bwd_sm90, packed, D=128, window",
        "bwd",
        Case((200, 128), window=(60, 20)),
        survivors.BACKWARD,
        add_dq=False,
    ),
    our_subject("bwd_sm90, packed, D=64", "bwd", Case((300, 128), head_dim=64), survivors.BACKWARD, add_dq=False),
    tutorial_attention(
        "hopper_fa_ws_pipelined_pingpong", (1, 1, 512, 128), None, tutorials.HOPPER_FA, survivors.HOPPER_PINGPONG
    ),
    tutorial_attention(
        "hopper_fa_ws_pipelined_pingpong_persistent",
        (1, 1, 384, 128),
        None,
        tutorials.HOPPER_FA_PERSISTENT,
        survivors.HOPPER_PERSISTENT,
    ),
    tutorial_attention("blackwell_fa_ws", (1, 1, 512, 128), None, tutorials.FA, survivors.BLACKWELL_FA),
    tutorial_attention(
        "blackwell_fa_ws_persistent",
        (1, 2, 512, 128),
        True,
        {**tutorials.FA_PERSISTENT, "NUM_BUFFERS_KV": 4},
        survivors.BLACKWELL_PERSISTENT,
    ),
    tutorial_attention(
        "blackwell_fa_ws_pipelined_persistent",
        (1, 2, 512, 128),
        True,
        {**tutorials.FA_PIPELINED, **PLAIN},
        survivors.BLACKWELL_PIPELINED,
    ),
    tutorial_attention(
        "blackwell_fa_clc", (1, 2, 512, 128), False, {**tutorials.FA_CLC, **PLAIN}, survivors.BLACKWELL_PIPELINED
    ),
    tutorial_backward(1, True, (1, 1, 512, 128), survivors.BLACKWELL_BACKWARD),
    tutorial_backward(2, False, (1, 1, 512, 128), survivors.BLACKWELL_BACKWARD),
    tutorial_gemm("blackwell_gemm_ws, 2 groups", MATMUL, TWO_GROUPS, survivors.GEMM),
    tutorial_gemm("blackwell_gemm_ws, 2 CTAs", MATMUL, TWO_CTAS, survivors.GEMM),
    tutorial_gemm("blackwell_gemm_2cta", "tcgen5_dot_kernel2cta_tma", None, survivors.GEMM, (512, 256, 256)),
    tutorial_gemm("hopper_gemm_ws", "matmul_kernel_tlx_ws", tutorials.HOPPER_GEMM_WS, survivors.GEMM),
]


def show(outcome: Outcome) -> None:
    by = f"{outcome.verdict} {outcome.by}"
    print(f"{by:24} {outcome.policy:6} {outcome.seconds:5.1f} s  {outcome.mutation}", flush=True)


COLUMNS = {
    "`barrier_wait`": ["barrier-wait"],
    "phase": ["phase"],
    "arrivals": ["barrier-arrive", "expect-bytes", "dot-arrive", "commit"],
    "`async_dot_wait`": ["dot-wait"],
    "one pending more": ["dot-pending"],
    "stores": ["store-wait", "store-pending"],
    "fence": ["fence"],
    "named": ["named-wait", "named-arrive"],
    "all": list(KINDS),
}


def table(folder: Path) -> str:
    """Markdown of the reports in a folder: how many of how many were caught, and how many of the rest are redundant."""
    lines = ["| kernel | " + " | ".join(COLUMNS) + " |", "|---|" + "--:|" * len(COLUMNS)]
    for subject in SUBJECTS:
        path = folder / f"{subject.file_name}.json"
        if path.exists():
            made = [o for o in json.loads(path.read_text())["mutations"] if o["verdict"] != "not executed"]
            cells = [cell([o for o in made if o["kind"] in kinds]) for kinds in COLUMNS.values()]
            lines.append(f"| {subject.name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def cell(outcomes: list[dict[str, Any]]) -> str:
    if not outcomes:
        return ""
    verdicts = Counter(outcome["verdict"] for outcome in outcomes)
    redundant = f" ({verdicts['redundant']} r)" if verdicts["redundant"] else ""
    return f"{verdicts['caught']}/{len(outcomes)}{redundant}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="a part of a kernel's name (default: all)")
    parser.add_argument("--out", type=Path, default=Path("results/mutations"), help="where the reports go, as JSON")
    parser.add_argument("--table", action="store_true", help="only show the table of the reports that are there")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for subject in [] if arguments.table else SUBJECTS:
        if arguments.names and not any(name in subject.name for name in arguments.names):
            continue
        report = subject.mutate(progress=show)
        print(f"== {subject.name}\n{report}", flush=True)
        for outcome in report.survivors:
            print(f"{outcome.mutation}\n    {subject.explanation(outcome) or 'NOT EXPLAINED'}", flush=True)
        (arguments.out / f"{subject.file_name}.json").write_text(report.to_json())
    print(table(arguments.out))


if __name__ == "__main__":
    main()
