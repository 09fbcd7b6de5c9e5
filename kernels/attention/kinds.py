"""What a configuration is chosen by: problems of one kind share it, within a process and in the files of the cache."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """One kernel and the properties of a problem that decide how it is best launched.

    ``mean_q`` and ``mean_k`` are the mean lengths of a sequence in rows, rounded down to a power of two (or 0). Kernels
    may be compiled for more, such as the number of heads, so that a kind that is known may have to be compiled again.
    """

    family: str  # of kernels: "triton", "sm90", "sm100"
    kernel: str  # "forward", "backward", "dkdv", "dq"
    dtype: str
    head_dim: int
    group: int  # query heads per key/value head
    broadcast: bool
    bounded_left: bool
    bounded_right: bool
    mean_q: int
    mean_k: int


def power_of_two_below(n: int) -> int:
    """The largest power of two that is at most ``n``; 0 for 0."""
    return 1 << (n.bit_length() - 1) if n else 0
