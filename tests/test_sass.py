"""On excerpts of what `ptxas -v` and `nvdisasm` printed for the shipped kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from jfabench.sass import KINDS, Line, Region, instructions, mixes, parse_assembler

DATA = Path(__file__).parent / "data"
LOAD = Region("load", 1, "fwd_sm90.py", 361, 362)
ATTEND = Region("attend", 2, "fwd_sm90.py", 363, 366)


def recorded(name: str) -> str:
    return (DATA / name).read_text()


def test_the_assembler_is_understood() -> None:
    assert parse_assembler(recorded("ptxas_clean.txt")) == (168, 0, 0, 11, False)
    assert parse_assembler(recorded("ptxas_spills.txt")) == (168, 8, 16, 11, False)


def test_a_kernel_without_barriers() -> None:
    said = "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\nptxas info    : Used 48 registers\n"
    assert parse_assembler(said).barriers == 0


def test_spills_of_functions_that_are_called_count() -> None:
    once = recorded("ptxas_spills.txt")
    called = "    8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads\n"
    assert parse_assembler(once + called)[1:3] == (12, 20)


def test_serialised_matmuls_are_seen() -> None:
    warning = (
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ..."
    )
    assert parse_assembler(recorded("ptxas_clean.txt") + warning).serialised


@pytest.mark.parametrize("said", ["", "ptxas info    : Used 48 registers", "0 bytes spill stores, 0 bytes spill loads"])
def test_an_assembler_that_says_nothing_is_an_error(said: str) -> None:
    with pytest.raises(ValueError, match="registers or spills"):
        parse_assembler(said)


def test_instructions_belong_to_the_outermost_line() -> None:
    found = {i.opcode: i.origin for i in instructions(recorded("nvdisasm_sm90.txt"))}
    assert found["HGMMA.64"] == Line("fwd_sm90.py", 366)  # `x128x16...` begins in lower case
    assert found["UTMALDG.2D"] == Line("fwd_sm90.py", 362)  # predicated with @UP0
    assert found["S2R"] == Line("fwd_sm90.py", 322)
    assert next(iter(instructions("        /*0000*/                   LDC R1, c[0x0][0x28] ;"))).origin is None


def test_roles_are_told_apart() -> None:
    whole, load, attend, rest = mixes(recorded("nvdisasm_sm90.txt"), [LOAD, ATTEND])
    assert [(mix.role, mix.copies) for mix in (whole, load, attend, rest)] == [
        ("all", 1),
        ("load", 1),
        ("attend", 2),
        ("rest", 1),
    ]
    for kind in KINDS:
        assert whole.counts[kind] == load.counts[kind] + attend.counts[kind] + rest.counts[kind], kind
    assert (load.counts["tma_load"], attend.counts["tma_load"]) == (3, 0)
    assert (load.counts["tensor"], attend.counts["tensor"]) == (0, 2)
    assert (attend.counts["exp2"], attend.counts["fp32"]) == (2, 3)
    assert whole.counts["mbarrier_try"] == 3


@pytest.mark.parametrize("regions", [[], [LOAD, Region("store", 1, "other.py", 1, 9)]])
def test_the_whole_alone_without_roles_or_where_they_cannot_be_told_apart(regions: list[Region]) -> None:
    (whole,) = mixes(recorded("nvdisasm_sm90.txt"), regions)
    assert whole.role == "all"


def test_blackwell() -> None:
    (whole,) = mixes(recorded("nvdisasm_sm100.txt"), [])
    counted = {kind: n for kind, n in whole.counts.items() if n}
    assert counted == {"instructions": 20, "tensor": 2, "tmem_load": 2, "tmem_store": 2, "mbarrier_try": 1}


@pytest.mark.parametrize(
    ("opcode", "kind"),
    [
        ("HMMA.16816.F32.BF16", "tensor"),
        ("UTCHMMA.2CTA", "tensor"),
        ("UTMASTG.2D", "tma_store"),
        ("UTMAREDG.2D.ADD", "tma_reduce"),
        ("BAR.SYNC.DEFER_BLOCKING", "barrier_sync"),
        ("LDL.LU", "local_load"),
        ("STL.64", "local_store"),
        ("FFMA2", "fp32"),
        ("FMNMX.NAN", "fp32"),
        ("MUFU.RCP", None),
        ("BAR.ARV", None),
        ("SYNCS.ARRIVE.TRANS64", None),
        ("F2FP.BF16.F32.PACK_AB", None),
        ("FSETP.GT.AND", None),
        ("UTMACMDFLUSH", None),
    ],
)
def test_an_opcode_is_of_one_kind(opcode: str, kind: str | None) -> None:
    expected = {"instructions"} | ({kind} if kind else set())
    assert {name for name, belongs in KINDS.items() if belongs(opcode)} == expected
