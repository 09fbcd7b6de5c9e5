"""The tutorials that come with fbtriton, as cases: each runs one unmodified, and returns the error of its results.

Sizes are the smallest that give every role several steps, and persistent programs several tiles.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mx
import torch
import triton.language.extra.tlx as tlx
from triton.tools.tensor_descriptor import TensorDescriptor

from jfabench.sim import fakes

FOLDER = Path(tlx.__file__).parent / "tutorials"


@dataclass(frozen=True)
class Tutorial:
    """``run`` calls the tutorial and returns the largest error of its results, against torch in float32."""

    name: str
    arch: str
    run: Callable[[], float]
    limit: float
    options: tuple[tuple[str, Any], ...] = ()  # of `simulated_gpu`


@functools.cache
def module(name: str, capability: int) -> Any:
    """A tutorial's module; it asks for a driver when it is imported."""
    qualified = f"tlx_tutorials.{name.replace('-', '_')}"
    spec = importlib.util.spec_from_file_location(qualified, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[qualified] = loaded
    with fakes.driver(capability), mx.stand_in():
        spec.loader.exec_module(loaded)
    return loaded


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    difference = (actual.detach().float() - expected.detach().float()).abs()
    return float("nan") if difference.isnan().any() else float(difference.max())


def inputs(z: int, h: int, n: int, d: int, dtype: torch.dtype = torch.float16) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(20)
    return tuple((torch.randn(z, h, n, d, generator=generator) * 0.5).to(dtype) for _ in range(3))


def attention(name: str, capability: int, shape: tuple[int, ...], causal: bool | None, config: dict[str, Any]) -> float:
    q, k, v = inputs(*shape)
    further = () if causal is None else (causal,)
    out = module(name, capability).attention(q, k, v, 0.5, *further, config=config)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.float(), k.float(), v.float(), scale=0.5, is_causal=bool(causal)
    )
    return error(out, expected)


def gemm(
    name: str,
    capability: int,
    shape: tuple[int, int, int],
    config: Any,
    dtype: torch.dtype = torch.float16,
    function: str = "matmul",
) -> float:
    m, n, k = shape
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(m, k, generator=generator).to(dtype)
    b = torch.randn(k, n, generator=generator).to(dtype)
    # A copy: some take their launch options out of it.
    further = {} if config is ... else {"config": dict(config) if config else None}
    out = getattr(module(name, capability), function)(a, b, **further)
    return error(out, a.float() @ b.float()) / k**0.5


def attention_backward(causal: bool, shape: tuple[int, int, int, int]) -> float:
    """The largest error of the gradients, forward included, through autograd."""
    tutorial = module("blackwell_fa_ws_pipelined_persistent", 100)
    q, k, v = (tensor.requires_grad_() for tensor in inputs(*shape))
    out = tutorial.attention(q, k, v, 0.5, causal)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    exact = [tensor.detach().float().requires_grad_() for tensor in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*exact, scale=0.5, is_causal=causal)
    wanted = torch.autograd.grad(expected, exact, dout.float())
    return max(error(a, b) for a, b in zip((out, *gradients), (expected, *wanted), strict=True))


def layer_norm(name: str, function: str, rows: int, columns: int, **options: Any) -> float:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, columns, generator=generator).half()
    weight, bias = (torch.randn(columns, generator=generator).half() for _ in range(2))
    out = getattr(module(name, 100), function)(x, weight, bias, 1e-5, **options)[0]
    return error(out, torch.nn.functional.layer_norm(x.float(), (columns,), weight.float(), bias.float(), 1e-5))


def grouped_gemm(function: str) -> float:
    tutorial = module("blackwell-grouped-gemm_test", 100)
    generator = torch.Generator().manual_seed(0)
    sizes = (256, 128)
    a = [torch.rand(n, n, generator=generator).half() for n in sizes]
    b = [torch.rand(n, n, generator=generator).half() for n in sizes]
    found = getattr(tutorial, function)(a, b)
    if function == "group_gemm_tma_fn":  # it takes B transposed
        b = [matrix.T for matrix in b]
    return max(error(c, x.float() @ y.float()) / 256**0.5 for c, x, y in zip(found, a, b, strict=True))


def cross_attention(variant: str) -> float:
    """SiLU attention of jagged queries over jagged keys."""
    tutorial = module("blackwell-cross-attention", 100)
    generator = torch.Generator().manual_seed(0)
    q_lengths, k_lengths = [100, 30], [200, 300]
    q_offsets, k_offsets = (torch.tensor([0, *lengths]).cumsum(0) for lengths in (q_lengths, k_lengths))

    def values(rows: int) -> torch.Tensor:
        return (torch.rand(rows, 2, 128, generator=generator) - 0.5).bfloat16()

    q, k, v = values(sum(q_lengths)), values(sum(k_lengths)), values(sum(k_lengths))
    out = tutorial.hstu_cross_mha(512, 128**-0.5, q, k, v, k_offsets, q_offsets, None, variant, max_q_len=128)
    expected = []
    for b in range(2):
        rows, keys = slice(q_offsets[b], q_offsets[b + 1]), slice(k_offsets[b], k_offsets[b + 1])
        scores = torch.einsum("qhd,khd->hqk", q[rows].float(), k[keys].float()) * 128**-0.5
        expected.append(torch.einsum("hqk,khd->qhd", torch.nn.functional.silu(scores), v[keys].float()))
    return error(out, torch.cat(expected) * CROSS_SCALE)


def mxfp8_forward(causal: bool, shape: tuple[int, int, int, int]) -> float:
    tutorial = module("blackwell_fa_ws_pipelined_persistent_mxfp8", 100)
    torch.manual_seed(20)
    quantised = tutorial.generate_attention_inputs(shape, torch.device("cpu"), torch.float8_e4m3fn)
    (q, q_scale, q_ref), (k, k_scale, k_ref), (v, v_scale, v_ref) = quantised
    out = tutorial.attention(q, k, v, q_scale, k_scale, v_scale, 0.5, causal, config=MXFP8)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q_ref.float(), k_ref.float(), v_ref.float(), scale=0.5, is_causal=causal
    )
    return error(out, expected)


def mxfp8_backward(causal: bool, shape: tuple[int, int, int, int]) -> float:
    """One minus the smallest cosine between a gradient and that of unrounded inputs, as the tutorial's test has it."""
    tutorial = module("blackwell_fa_ws_pipelined_persistent_mxfp8", 100)
    z, h, n, d = shape
    dtype = torch.float8_e4m3fn
    torch.manual_seed(20)
    quantised = tutorial.generate_attention_inputs(shape, torch.device("cpu"), dtype)
    (q, q_scale, q_ref), (k, k_scale, k_ref), (v, v_scale, v_ref) = quantised
    exact = [tensor.float().requires_grad_() for tensor in (q_ref, k_ref, v_ref)]
    expected = torch.nn.functional.scaled_dot_product_attention(*exact, scale=0.5, is_causal=causal)
    dout = torch.randn(expected.shape).bfloat16()
    wanted = torch.autograd.grad(expected, exact, dout.float())

    def quantise(tensor: torch.Tensor, along_rows: bool) -> tuple[torch.Tensor, torch.Tensor]:
        flat = tensor.reshape(-1, d)
        made = mx.MXTensor.to_mx(flat.T.contiguous() if along_rows else flat, dtype)
        data = (made.qdata.T if along_rows else made.qdata).reshape(shape).contiguous()
        size = (d, n) if along_rows else (n, d)
        return data, tutorial.swizzled_to_tma_preshuffled(made.scale, *size, 32, z * h)

    q_dk, q_scale_dk = quantise(q_ref, True)
    k_dq, k_scale_dq = quantise(k_ref, True)
    v_bwd, v_scale_bwd = quantise(v_ref, False)
    do, do_scale = quantise(dout, False)
    do_dv, do_scale_dv = quantise(dout, True)
    out, peaks = torch.empty(shape, dtype=torch.bfloat16), torch.empty(z * h * n)

    def rows(tensor: torch.Tensor) -> TensorDescriptor:
        return TensorDescriptor(tensor, [z * h * n, d], [d, 1], [1, 1])

    descriptors = {"desc_q": rows(q), "desc_k": rows(k), "desc_v": rows(v), "desc_o": rows(out)}
    descriptors["desc_m"] = TensorDescriptor(peaks, [z * h * n], [1], [1])
    for name, scale in (("q", q_scale), ("k", k_scale), ("v", v_scale)):
        descriptors[f"desc_{name}_scale"] = TensorDescriptor.from_tensor(scale, block_shape=[1] * 5)
    tutorial._mxf8_host_descriptor_pre_hook({**MXFP8, "HEAD_DIM": d, **descriptors})
    grid = (min(2, n // 256 * z * h), 1, 1)
    stage = 3 if causal else 1
    tutorial._attn_fwd_mxf8_ws.fn[grid](0.5, Z=z, H=h, N_CTX=n, HEAD_DIM=d, STAGE=stage, **descriptors, **MXFP8)
    found = tutorial.attention_bwd(
        do,
        do_dv,
        q,
        q_dk,
        k,
        k_dq,
        v_bwd,
        out,
        peaks.reshape(z, h, n),
        q_scale,
        q_scale_dk,
        k_scale,
        k_scale_dq,
        v_scale_bwd,
        do_scale,
        do_scale_dv,
        0.5,
        do_bf16=dout,
        causal=causal,
    )
    cosines = [torch.cosine_similarity(a.float().flatten(), b.flatten(), 0) for a, b in zip(found, wanted, strict=True)]
    return 1 - float(min(cosines))


CROSS_SCALE = 1 / 512
HOPPER_FA = {"BLOCK_M": 128, "BLOCK_N": 128, "NUM_BUFFERS": 2, "NUM_MMA_WARPS": 8, "NUM_MMA_GROUPS": 2}
HOPPER_FA_PERSISTENT = {
    "BLOCK_M": 128,
    "BLOCK_N": 128,
    "NUM_BUFFERS_Q": 1,
    "NUM_BUFFERS_KV": 2,
    "NUM_MMA_WARPS": 8,
    "NUM_MMA_GROUPS": 2,
}
FA = {"BLOCK_M": 256, "BLOCK_N": 128, "NUM_BUFFERS_KV": 3, "NUM_BUFFERS_QK": 1, "NUM_MMA_GROUPS": 2}
FA_PERSISTENT = {**FA, "NUM_BUFFERS_Q": 1}
FA_PIPELINED = {**FA_PERSISTENT, "NUM_MMA_SLICES": 2, "GROUP_SIZE_N": 1, "USE_WARP_BARRIER": False}
FA_CLC = {**FA_PERSISTENT, "NUM_MMA_SLICES": 2, "GROUP_SIZE_N": 1}
MXFP8 = {
    **FA_PERSISTENT,
    "NUM_Q_SCALE_TMEM_BUFFERS": 1,
    "NUM_KV_SCALE_TMEM_BUFFERS": 2,
    "GROUP_SIZE_N": 1,
    "RESCALE_OPT": True,
}
GEMM_WS = {
    "BLOCK_SIZE_M": 128,
    "BLOCK_SIZE_N": 256,
    "BLOCK_SIZE_K": 64,
    "GROUP_SIZE_M": 8,
    "NUM_SMEM_BUFFERS": 2,
    "NUM_TMEM_BUFFERS": 2,
    "NUM_MMA_GROUPS": 1,
    "EPILOGUE_SUBTILE": 1,
    "NUM_CTAS": 1,
    "SPLIT_K": 1,
    "INTERLEAVE_EPILOGUE": 0,
}
GEMM_CLC = {
    "BLOCK_SIZE_M": 128,
    "BLOCK_SIZE_N": 256,
    "BLOCK_SIZE_K": 64,
    "GROUP_SIZE_M": 8,
    "NUM_SMEM_BUFFERS": 2,
    "NUM_TMEM_BUFFERS": 2,
    "EPILOGUE_SUBTILE": True,
}
GEMM_PIPELINED = {"BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 8, "NUM_STAGES": 4}
HOPPER_GEMM = {"BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": 256, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 8, "NUM_STAGES": 3}
HOPPER_GEMM_WS = {
    "BM": 128,
    "BN": 256,
    "BK": 64,
    "GROUP_SIZE_M": 8,
    "NUM_STAGES": 3,
    "NUM_MMA_WARPS": 8,
    "NUM_MMA_GROUPS": 2,
    "EPILOGUE_SUBTILE": False,
    "NUM_CTAS": 1,
}


def _wanted(ctas: int, config: Any) -> bool:
    return config.kwargs.get("NUM_CTAS", ctas) == ctas


def _fa(name: str, arch: str, shape: tuple[int, ...], causal: bool | None, config: Any, text: str = "") -> Tutorial:
    run = functools.partial(attention, name, int(arch[3:]), shape, causal, config)
    return Tutorial(name + text, arch, run, 1e-2)


def _gemm(name: str, arch: str, shape: tuple[int, int, int], config: Any, text: str = "", **options: Any) -> Tutorial:
    run = functools.partial(gemm, name, int(arch[3:]), shape, config, **options)
    return Tutorial(name + text, arch, run, 2e-2 if "dtype" in options else 1e-2)


def _other(
    name: str, run: Callable[..., float], *arguments: Any, arch: str = "sm_100", limit: float = 1e-2, **options: Any
) -> Tutorial:
    return Tutorial(name, arch, functools.partial(run, *arguments), limit, tuple(options.items()))


LONG, PAIR = (1, 1, 384, 128), (1, 3, 512, 128)
PIPELINED = "blackwell_fa_ws_pipelined_persistent"
PIPELINED_CONFIGS = {
    " causal": {"RESCALE_OPT": False, "USE_WHERE": False},
    " full, rescaling, warp barriers": {"RESCALE_OPT": True, "USE_WHERE": False, "USE_WARP_BARRIER": True},
    " causal, rescaling by where, 128 rows": {"RESCALE_OPT": True, "USE_WHERE": True, "BLOCK_M": 128},
}
CLUSTER = {"NUM_CTAS": 2, "ctas_per_cga": (2, 1, 1)}
GEMM_CONFIGS = {
    "": {},
    ", 2 CTAs": CLUSTER,
    ", split K": {"SPLIT_K": 2},
    ", subtiles, 2 groups": {"BLOCK_SIZE_M": 256, "NUM_TMEM_BUFFERS": 1, "NUM_MMA_GROUPS": 2, "EPILOGUE_SUBTILE": 4},
}
WARP = {"USE_WARP_BARRIER": True}

TUTORIALS = [
    _fa("hopper_fa_ws", "sm_90", LONG, None, HOPPER_FA),
    _fa("hopper_fa_ws_pipelined", "sm_90", LONG, None, HOPPER_FA),
    _fa("hopper_fa_ws_pipelined_pingpong", "sm_90", LONG, None, HOPPER_FA),
    _fa("hopper_fa_ws_pipelined_pingpong_persistent", "sm_90", (1, 3, 256, 128), None, HOPPER_FA_PERSISTENT),
    _fa("blackwell_fa_ws", "sm_100", (1, 1, 512, 128), None, FA),
    _fa("blackwell_fa_ws_persistent", "sm_100", PAIR, True, FA_PERSISTENT),
    _fa("blackwell_fa_ws_pipelined", "sm_100", (1, 1, 512, 128), True, FA),
    *[
        _fa(PIPELINED, "sm_100", PAIR, "causal" in text, {**FA_PIPELINED, **config}, text)
        for text, config in PIPELINED_CONFIGS.items()
    ],
    *[
        _fa("blackwell_fa_clc", "sm_100", PAIR, causal, {**FA_CLC, "RESCALE_OPT": not causal, "USE_WHERE": False}, text)
        for causal, text in ((True, " causal"), (False, " full, rescaling"))
    ],
    *[
        _other(
            f"{PIPELINED} backward, {'1 CTA' if ctas == 1 else '2 CTAs'}, {'causal' if causal else 'full'}",
            attention_backward,
            *(causal, (1, 2, 256 * ctas, 128)),
            limit=2e-2,
            config=functools.partial(_wanted, ctas),
        )
        for ctas in (1, 2)
        for causal in (False, True)
    ],
    # The tolerances are those of the tutorial's own tests: the inputs are rounded to 8 bits.
    _other(f"{PIPELINED}_mxfp8 full", mxfp8_forward, False, (1, 3, 256, 128), limit=0.08),
    _other(f"{PIPELINED}_mxfp8 causal", mxfp8_forward, True, (1, 2, 512, 128), limit=0.11),
    _other(f"{PIPELINED}_mxfp8 backward, full", mxfp8_backward, False, (1, 2, 256, 128), limit=0.02),
    _other(f"{PIPELINED}_mxfp8 backward, causal", mxfp8_backward, True, (1, 1, 512, 128), limit=0.02),
    *[
        _gemm("blackwell_gemm_ws", "sm_100", (512, 512, 256), {**GEMM_WS, **config}, text)
        for text, config in GEMM_CONFIGS.items()
    ],
    _gemm(
        *("blackwell_gemm_ws", "sm_100", (256, 512, 256), {**GEMM_WS, **WARP}, ", warp barriers, bfloat16"),
        dtype=torch.bfloat16,
    ),
    _gemm("blackwell_gemm_clc", "sm_100", (512, 512, 256), GEMM_CLC),
    _gemm("blackwell_gemm_clc", "sm_100", (512, 512, 256), {**GEMM_CLC, **WARP}, ", warp barriers"),
    _gemm("blackwell_gemm_pipelined", "sm_100", (256, 256, 512), GEMM_PIPELINED),
    _gemm("blackwell_gemm_2cta", "sm_100", (512, 256, 256), None),
    _gemm("hopper_gemm_pipelined", "sm_90", (256, 512, 256), HOPPER_GEMM),
    _gemm("hopper_gemm_ws", "sm_90", (256, 512, 256), HOPPER_GEMM_WS),
    _gemm("hopper_gemm_ws", "sm_90", (256, 512, 256), {**HOPPER_GEMM_WS, **WARP}, ", warp barriers"),
    _gemm("hopper_gemm_ws", "sm_90", (512, 512, 256), {**HOPPER_GEMM_WS, **CLUSTER}, ", multicast to 2 CTAs"),
    *[
        _gemm(f"hopper-persistent-gemm-ws-{how}", "sm_90", (256, 512, 256), ..., function="matmul_tlx_ws_persistent")
        for how in ("cooperative", "pingpong")
    ],
    *[
        _other(f"blackwell-grouped-gemm {function}", grouped_gemm, function)
        for function in ("group_gemm_fn", "group_gemm_tma_fn", "group_gemm_tlx_fn")
    ],
    _other(
        "blackwell-multi-cta-layernorm",
        *(layer_norm, "blackwell-multi-cta-layernorm_test", "multi_cta_layernorm", 3, 65536),
    ),
    _other(
        "blackwell_multi_cta_layernorm_ws",
        *(layer_norm, "blackwell_multi_cta_layernorm_ws_test", "multi_cta_layernorm_ws", 7, 16384),
    ),
    _other(
        "multi_cta_layer_norm",
        *(layer_norm, "testing/multi_cta_layer_norm", "multi_cta_layernorm", 4, 16384),
        arch="sm_90",
    ),
    *[
        _other(f"blackwell-cross-attention {variant}", cross_attention, variant)
        for variant in ("triton", "triton_dyn_spec", "tlx_single_q", "tlx_pipeline")
    ],
]
