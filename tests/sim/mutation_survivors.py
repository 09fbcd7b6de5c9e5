"""Mutations that nothing catches, by a part of their name, and why.

Either the mutant is as good as the original, or the simulator cannot see the difference, and then it says so.
"""

from __future__ import annotations

# Ours -----------------------------------------------------------------------------------------------------------------

_COMPILER_FENCE = (
    "the compiler puts a fence of its own between a local_store and the asynchronous operation that reads the buffer"
)
_ONE_THREAD = "not seen: a warp group is one thread to the simulator, and this orders its warps"

FORWARD = {
    "wait_turn(watch)  # every pass is waited for": "nothing comes after it: it only leaves no arrival pending",
    "fence in _finish": _COMPILER_FENCE,
}
_LOADER = {
    "buffers.k.acquire(r, watch)": (
        "K of tile r - 2 was last read before dO of its last step was released, for which V of tile r - 1 waited"
    ),
    "buffers.dout.acquire(n, watch)": "Q of the same step was waited for just before, and is released after dO",
}
BACKWARD = {**_LOADER, "named-wait in _load_dout": _ONE_THREAD}
BACKWARD_DQ = {
    **BACKWARD,
    "fence in Consumer.announce_ds": _COMPILER_FENCE,
    "dot-pending in _step: tlx.async_dot_wait(2 if AHEAD and me.add_dq else 1, dk)": (
        "it waits for the first of the two matmuls of dQ as well, which was issued after dK's"
    ),
}
BACKWARD_PROMPT_DQ = {
    **BACKWARD_DQ,
    "await_other(buffers.read, C, ": (
        "what `written` waited for in the step before comes after it in the other consumer"
    ),
}
BACKWARD_LATE_DQ = {
    **BACKWARD_DQ,
    "buffers.k.acquire(r, watch)": (
        "a tile has four steps here: K of tile r - 2 was released in the first of tile r - 1, before Q of the second, "
        "for which the loader waited to load the last"
    ),
    "await_other(buffers.written, OTHER, n, watch)": (
        "but for the very first step: what `read` waited for in the same step comes after it in the other consumer"
    ),
}

# Tutorials ------------------------------------------------------------------------------------------------------------

_ALPHA = "the scores that were waited for were issued after P V of the step before, which needs that alpha was read"

HOPPER_PINGPONG = {
    "named-wait in _attn_fwd_ws_pipelined_pingpong: tlx.named_barrier_wait(9, 256)": (
        "turns are for speed: consumer 0 stays one turn ahead, and an arrival is left over in the end"
    ),
    "tlx.barrier_arrive(v_empties[v_buf_id], 1)": "the last release of all, for which nobody waits",
}
HOPPER_PERSISTENT = {
    "tlx.async_dot_wait(1, acc)": "one matmul is in flight, so that a wait for all but one waits for nothing",
    "tlx.barrier_wait(k_empties[kv_bufIdx], kv_phase ^ 1)": (
        "at a tile's start: q_empties, waited for before, is released after the last K was read"
    ),
    "tlx.barrier_wait(v_empties[kv_bufIdx], kv_phase ^ 1)": (
        "at a tile's start: with two buffers it is the last V but one, which was read before q_empties was released"
    ),
}
BLACKWELL_FA = {"alpha_empties": _ALPHA}
BLACKWELL_PERSISTENT = {
    "alpha_empties": _ALPHA,
    "barrier-wait in _attn_fwd_ws: tlx.barrier_wait(qk_empties[0], q_phase ^ 1)": (
        "the task that arrives at it goes on to arrive at qk_empties[1], which is waited for next"
    ),
    "barrier-wait in _attn_fwd_ws: tlx.barrier_wait(q_empties[q_bufIdx], q_phase ^ 1)": (
        "of the second half of Q: committed together with the first half's, which was waited for"
    ),
}
_TILE_START = "at a tile's start: q_empties, waited for before, is committed after the matmuls that read the buffer"
BLACKWELL_PIPELINED = {
    "alpha_empties": _ALPHA,
    "tlx.barrier_wait(k_empty, k_phase ^ 1)": _TILE_START,
    "tlx.barrier_wait(v_empty, v_phase ^ 1)": _TILE_START,
    "tlx.barrier_wait(q_empties[q_bufIdx], q_phase ^ 1)": (
        "of the second half of Q: committed together with the first half's, which was waited for"
    ),
    "tlx.barrier_wait(o_empties[cid], phase ^ 1)": (
        "the same task has asked for a further tile before, which waits until all have done with the last one"
    ),
}
_BEFORE_DS = "released before dS was written, which the matmul that released Q of the same step needed"
_NOBODY_WAITS = "a program has one tile: it is the last release, for which nobody waits"
BLACKWELL_BACKWARD = {
    "there is nothing yet to wait for": "a program has one tile, and this waits for slots that nobody has used yet",
    "QK_READ_DONE_BAR": _ONE_THREAD,
    "DP_READ_DONE_BAR": _ONE_THREAD,
    "fence in _bwd_compute_inner_loop": _COMPILER_FENCE,
    "fence in _attn_bwd_ws": _COMPILER_FENCE,
    "barrier_wait(qk_empties[tmem_buf_id], tmem_phase ^ 1)": (
        "arrived at just before p_fulls of the same step, which was waited for"
    ),
    "barrier_wait(dp_empties[tmem_buf_id], tmem_phase ^ 1)": (
        "arrived at before dsT_tmem_fulls of the same step, which was waited for"
    ),
    "barrier_wait(ds_fulls[": "arrived at just before dsT_tmem_fulls of the same step, which was waited for",
    "barrier_wait(m_empties[": _BEFORE_DS,
    "barrier_wait(d_empties[": _BEFORE_DS,
    "barrier_wait(q_empties[prev_q_buf_id]": (
        "dot_empties, waited for before, is arrived at by a matmul issued after the one that read the slot"
    ),
    "barrier_wait(p_fulls[": "arrived at just after qk_empties of the same step, which was waited for",
    "barrier_wait(kt_fulls[": "waited for once before, in the same phase",
    "barrier_wait(dk_fulls[": "k_mma_done, waited for next, is committed after the matmul that arrives at it",
    "barrier_wait(k_mma_done[": (
        "with 2 CTAs dQ reads kt_tiles; the last matmul that reads k_tiles comes before the one that dk_fulls tells of"
    ),
    "mBarriers: q_empties[q_buf_id]": _NOBODY_WAITS,
    "mBarriers: dp_empties[ds_buf_id]": _NOBODY_WAITS,
    "tcgen05_commit(kt_empties[": _NOBODY_WAITS,
    "tcgen05_commit(k_empties[": _NOBODY_WAITS,
    "barrier_arrive(dv_empties[": _NOBODY_WAITS,
    "barrier_arrive(dk_empties[": _NOBODY_WAITS,
    "barrier_arrive(k_empties[": _NOBODY_WAITS,
    "barrier_arrive(m_empties[": "of the last steps, for which nobody waits",
    "barrier_arrive(d_empties[": "of the last steps, for which nobody waits",
}
GEMM = {
    "barrier_wait(A_smem_empty_bars[a_buf], phase ^ 1)": "the last group's, for which the load of B waited just before",
    "barrier_wait(bar=empty_a_2nd, phase=p ^ 1)": (
        "of the second half of A: empty_b, waited for before, needs an arrival that its group makes after that for A"
    ),
    "barrier_wait(A_smem_empty_bars[last_a_buf], phase ^ 1)": "with one group it is the barrier waited for just before",
}
