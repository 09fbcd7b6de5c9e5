"""What is left of dQ after a kernel has added to it in float32: the factor and the rounding."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["elements"])
def round_kernel(sums, dq, elements, sm_scale, BLOCK: tl.constexpr):
    """``dq = sm_scale * sums``, ``[elements]`` each, ``sums`` float32 and ``dq`` 16-bit."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(sums + at, mask=at < elements, other=0.0) * sm_scale
    tl.store(dq + at, value.to(dq.dtype.element_ty), mask=at < elements)
