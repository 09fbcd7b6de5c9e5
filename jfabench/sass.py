"""Reads what `ptxas -v` and `nvdisasm` print: registers and spills, and which instructions a kernel is made of.

Counts are of instructions in the code, not of executions.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePath
from typing import NamedTuple

FP32 = {f"{operation}{lanes}" for operation in ("FADD", "FMUL", "FFMA", "FMNMX") for lanes in ("", "2", "3")}


def _starts(*prefixes: str) -> Callable[[str], bool]:
    return lambda opcode: opcode.startswith(prefixes)


# What is counted, by name: of an opcode with its modifiers, such as `UTMALDG.2D`.
KINDS: dict[str, Callable[[str], bool]] = {
    "instructions": lambda opcode: opcode != "NOP",
    "tensor": lambda opcode: opcode.partition(".")[0].endswith("MMA"),  # HMMA, HGMMA, UTCHMMA, ...
    "tma_load": _starts("UTMALDG"),
    "tma_store": _starts("UTMASTG"),
    "tma_reduce": _starts("UTMAREDG"),
    "tmem_load": _starts("LDTM"),
    "tmem_store": _starts("STTM"),
    "exp2": _starts("MUFU.EX2"),
    # A wait for an mbarrier is two in the code: the first try, and the loop that repeats it.
    "mbarrier_try": lambda opcode: opcode.startswith("SYNCS") and "TRYWAIT" in opcode,
    "barrier_sync": _starts("BAR.SYNC"),
    "local_load": _starts("LDL"),
    "local_store": _starts("STL"),
    "fp32": lambda opcode: opcode.partition(".")[0] in FP32,
}


class AssemblerReport(NamedTuple):
    """Registers of a thread at launch, bytes of spill stores and loads, named barriers."""

    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    barriers: int
    serialised: bool  # the assembler had to serialise the asynchronous matmuls


def parse_assembler(said: str) -> AssemblerReport:
    """Of the output of `ptxas -v` for one kernel, spills summed over the functions that it calls."""
    used = re.search(r"Used (\d+) registers", said)
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    if used is None or not spills:
        raise ValueError(f"ptxas -v said nothing of registers or spills: {said.strip()[:200]!r}")
    barriers = re.search(r"used (\d+) barriers", said)
    stores, loads = (sum(map(int, column)) for column in zip(*spills, strict=True))
    return AssemblerReport(int(used[1]), stores, loads, int(barriers[1]) if barriers else 0, "serialized" in said)


class Line(NamedTuple):
    """A line of source, in a file named without its folder: compiled code may come from a cache of another checkout."""

    file: str
    number: int


class Instruction(NamedTuple):
    """`origin` is the line of the kernel itself from which the instruction came, whatever was inlined there."""

    opcode: str
    origin: Line | None


_SOURCE = re.compile(r'\s*//## File "([^"]+)", line (\d+)( inlined at)?')
_INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][A-Z0-9_.]*)")


def instructions(listing: str) -> Iterator[Instruction]:
    """Of the output of `nvdisasm --print-line-info-inline`, in order.

    Before an instruction of another line than the one before stand the line itself and the calls that it was inlined
    through, the outermost last; only that one lacks `inlined at`.
    """
    origin: Line | None = None
    for text in listing.splitlines():
        if source := _SOURCE.match(text):
            if not source[3]:
                origin = Line(PurePath(source[1]).name, int(source[2]))
        elif found := _INSTRUCTION.match(text):
            yield Instruction(found[1], origin)


@dataclass(frozen=True)
class Region:
    """The lines `first` to `last` of `file`, which are a role; `copies` of it are in the code."""

    role: str
    copies: int
    file: str
    first: int
    last: int

    def __contains__(self, line: object) -> bool:
        return isinstance(line, Line) and line.file == self.file and self.first <= line.number <= self.last


class Mix(NamedTuple):
    """How many instructions of each of KINDS a role has, all `copies` of it together."""

    role: str
    copies: int
    counts: dict[str, int]


WHOLE, REST = "all", "rest"


def mixes(listing: str, regions: Iterable[Region]) -> list[Mix]:
    """Of the whole kernel, then of each role, then of what belongs to none, such as setting up barriers.

    Of the whole alone if the kernel has no roles, or if the line table does not tell them apart.
    """
    code = list(instructions(listing))
    by_role = {region: [i.opcode for i in code if i.origin in region] for region in regions}
    found = [Mix(WHOLE, 1, _count(i.opcode for i in code))]
    if by_role and all(by_role.values()):
        rest = [i.opcode for i in code if not any(i.origin in region for region in by_role)]
        found += [Mix(region.role, region.copies, _count(opcodes)) for region, opcodes in by_role.items()]
        found.append(Mix(REST, 1, _count(rest)))
    return found


def _count(opcodes: Iterable[str]) -> dict[str, int]:
    counted = Counter(opcodes)
    return {name: sum(n for opcode, n in counted.items() if belongs(opcode)) for name, belongs in KINDS.items()}
