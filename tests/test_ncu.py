"""The table of metrics, the command line and the parsing, on outputs that `ncu` gave on an H200."""

from __future__ import annotations

from pathlib import Path

import pytest

from jfabench import ncu

DATA = Path(__file__).parent / "data"


def known(chip: str) -> frozenset[str]:
    """Names that `ncu --query-metrics --chip ...` lists, of the families that the table takes from."""
    return frozenset((DATA / f"ncu_metrics_{chip}.txt").read_text().split())


@pytest.mark.parametrize("architecture", ncu.CHIPS)
@pytest.mark.parametrize("choice", ncu.CHOICES)
def test_every_name_in_the_table_is_one_that_ncu_lists(architecture: str, choice: ncu.Choice) -> None:
    chosen, unknown = ncu.select(choice, architecture, known(ncu.CHIPS[architecture]))
    assert unknown == ()
    assert {"duration_s", "registers"} <= {metric.name for metric in chosen.values()}
    assert chosen == ncu.select(choice, architecture)[0]


def test_the_table_is_one_to_one() -> None:
    assert len(ncu.BY_NAME) == len(ncu.METRICS)
    for architecture in ncu.CHIPS:
        raws = [raw for metric in ncu.METRICS if (raw := metric.raw_on(architecture))]
        assert len(raws) == len(set(raws))


def test_all_is_the_union_of_the_others_and_blackwell_has_its_own() -> None:
    for architecture in ncu.CHIPS:
        parts = [set(ncu.select(choice, architecture)[0]) for choice in ncu.CHOICES if choice != "all"]
        assert set(ncu.select("all", architecture)[0]) == set.union(*parts)
    blackwell = {metric.name: raw for raw, metric in ncu.select("roofline", "sm_100")[0].items()}
    assert blackwell["tensor_pipe_pct"].startswith("sm__pipe_tc_cycles_active.")
    assert blackwell["tmem_pct"].startswith("sm__mem_tensor_cycles_active.")
    hopper = {metric.name: raw for raw, metric in ncu.select("roofline", "sm_90")[0].items()}
    assert hopper["tensor_pipe_pct"].startswith("sm__pipe_tensor_cycles_active.")
    assert "tmem_pct" not in hopper


def test_what_this_ncu_lacks_is_left_out_and_named() -> None:
    chosen, unknown = ncu.select("memory", "sm_90", known("gh100") - {"lts__t_bytes"})
    assert unknown == ("lts__t_bytes.sum",)
    assert "lts__t_bytes.sum" not in chosen
    assert "launch__registers_per_thread" in chosen


@pytest.mark.parametrize(
    ("capability", "architecture"),
    [((9, 0), "sm_90"), ((10, 0), "sm_100"), ((10, 3), "sm_100"), ((8, 0), "sm_90"), (None, "sm_90")],
)
def test_other_gpus_take_the_nearest_architecture(capability: tuple[int, int] | None, architecture: str) -> None:
    assert ncu.nearest_architecture(capability) == architecture


def test_the_command_selects_ranges_and_leaves_the_clocks_alone(tmp_path: Path) -> None:
    words = ncu.command("ncu", ["a/fwd", "a/bwd"], ["x.sum", "y.avg"], ["python", "p"], log=tmp_path, report=None)
    text = " ".join(words)
    assert "--nvtx-include jfabench@a.fwd/ --nvtx-include jfabench@a.bwd/" in text
    assert "--nvtx-push-pop-scope process" in text
    assert "--clock-control none" in text
    assert "--target-processes all" in text
    assert "--metrics x.sum,y.avg" in text
    assert words[-2:] == ["python", "p"]
    assert "--export" not in words
    assert "--export" in ncu.command("ncu", ["a"], ["x"], ["p"], log=tmp_path, report=tmp_path / "r.ncu-rep")


# Recorded outputs -----------------------------------------------------------------------------------------------------


def test_a_recorded_output_with_many_metrics() -> None:
    readings = ncu.read_csv((DATA / "ncu_many_metrics.csv").read_text())
    assert len(readings) == 3 * 20
    assert [r.launch for r in readings] == [0] * 20 + [1] * 20 + [3] * 20
    assert {r.kernel[:30] for r in readings} == {"forward_sm90_kernel", "void cutlass::device_kernel<fl"}
    first = {r.raw: (r.value, r.unit) for r in readings if r.launch == 0}
    assert first["dram__bytes_read.sum"] == (167_616_256, "byte")
    assert first["gpu__time_duration.sum"] == (pytest.approx(176.48e-6), "s")
    assert first["lts__t_sector_hit_rate.pct"] == (69.55, "%")
    assert first["smsp__cycles_active.avg"] == (292_828.27, "cycle")
    assert first["l1tex__data_bank_conflicts_pipe_lsu.sum"] == (1_412_710, "")
    # A name that ncu does not know (the right one ends in `resolving`).
    assert first["smsp__average_warps_issue_stalled_branch_resolve_per_issue_active.ratio"] == (None, "")


def test_a_recorded_output_with_ranges() -> None:
    readings = ncu.read_csv((DATA / "ncu_nvtx.csv").read_text())
    forward = [r for r in readings if r.is_in("triton_jfa/fwd")]
    backward = [r for r in readings if r.is_in("triton_jfa/bwd")]
    assert (len(readings), len(forward), len(backward)) == (24, 8, 16)
    assert not [r for r in readings if r.is_in("triton_jfa/f") or r.is_in("jfa/fwd")]
    assert {r.kernel for r in forward} == {"tile_kernel", "forward_kernel"}
    assert "dkdv_kernel" in {r.kernel for r in backward}
    assert sum(r.value or 0 for r in forward) == pytest.approx(218.08e-6, rel=0.01)


def as_raw_page(text: str) -> str:
    """The same readings in the other form: one row a launch, units in the second line."""
    launches: dict[str, dict[str, str]] = {}
    units: dict[str, str] = {}
    import csv

    for row in csv.DictReader(line for line in text.splitlines() if line.startswith('"')):
        cells = launches.setdefault(row["ID"], {"ID": row["ID"], "Kernel Name": row["Kernel Name"]})
        cells[row["Metric Name"]] = row["Metric Value"]
        units[row["Metric Name"]] = row["Metric Unit"]
    names = list(next(iter(launches.values())))
    quoted = [names, [units.get(name, "") for name in names], *([c[n] for n in names] for c in launches.values())]
    return "\n".join(",".join('"' + cell.replace('"', '""') + '"' for cell in row) for row in quoted) + "\n"


def test_the_raw_page_of_a_report_says_the_same() -> None:
    text = (DATA / "ncu_many_metrics.csv").read_text()
    assert ncu.read_csv("==PROF== something\n" + as_raw_page(text)) == ncu.read_csv(text)


@pytest.mark.parametrize("end", [1, 5, 100, 3000])
def test_a_torn_output_gives_what_is_whole(end: int) -> None:
    text = (DATA / "ncu_many_metrics.csv").read_text()
    readings = ncu.read_csv(text[:-end])
    assert readings == ncu.read_csv(text)[: len(readings)]
    assert len(readings) >= 60 - 1 - end // 100


def test_no_counters_at_all() -> None:
    assert ncu.read_csv("") == []
    assert ncu.read_csv("==WARNING== No kernels were profiled.\n") == []
    assert ncu.read_csv('"some","text of the program"\n"0","x"\n') == []


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,412,710", 1412710.0),
        ("69.55", 69.55),
        ("1.5e3", 1500.0),
        ("-3", -3.0),
        ("n/a", None),
        ("", None),
        ("-nan(ind)", None),
        ("nan", None),
        ("inf", None),
        ("(!) nothing", None),
    ],
)
def test_numbers(text: str, value: float | None) -> None:
    assert ncu.read_number(text) == value


@pytest.mark.parametrize(
    ("unit", "factor", "base"),
    [
        ("ns", 1e-9, "s"),
        ("nsecond", 1e-9, "s"),
        ("usecond", 1e-6, "s"),
        ("msecond", 1e-3, "s"),
        ("second", 1, "s"),
        ("us", 1e-6, "s"),
        ("byte", 1, "byte"),
        ("Kbyte", 1e3, "byte"),
        ("Mbyte", 1e6, "byte"),
        ("Tbyte/s", 1e12, "byte/s"),
        ("Gbyte/second", 1e9, "byte/s"),
        ("byte/ns", 1e9, "byte/s"),
        ("Kbyte/block", 1e3, "byte/block"),
        ("Ghz", 1e9, "hz"),
        ("cycle/nsecond", 1e9, "cycle/s"),
        ("cycle", 1, "cycle"),
        ("register/thread", 1, "register/thread"),
        ("inst", 1, "inst"),
        ("sector", 1, "sector"),
        ("%", 1, "%"),
        ("", 1, ""),
    ],
)
def test_units(unit: str, factor: float, base: str) -> None:
    assert ncu.to_si(unit) == (pytest.approx(factor), base)


# Refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output", "part", "fatal"),
    [
        (
            "==PROF== Connected to process 7\n==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access "
            "NVIDIA GPU Performance Counters on the target device 0.\n==WARNING== No kernels were profiled.",
            "--cap-add=SYS_ADMIN",
            True,
        ),
        (
            "==ERROR== An error was reported by the driver:\n==ERROR== Cuda driver is not compatible with Nsight "
            "Compute.\n==ERROR== The application returned an error code (11).",
            "update the driver",
            True,
        ),
        ("==ERROR== Profiling is not supported on device 0.", "cannot profile this GPU", True),
        ("==ERROR== unrecognised option '--nvtx-push-pop-scope'", "too old", True),
        ("==ERROR== Failed to create lock file /tmp/nsight-compute-lock", "TMPDIR", True),
        ("==WARNING== No kernels were profiled.", "no kernel", False),
    ],
)
def test_refusals_are_explained(output: str, part: str, fatal: bool) -> None:
    problem = ncu.explain(ncu.messages(output))
    assert problem is not None
    assert part in problem.message
    assert "\n" not in problem.message
    assert problem.fatal is fatal


def test_what_is_not_known_is_not_explained() -> None:
    assert ncu.explain(ncu.messages("==PROF== Connected\nERR_NVGPUCTRPERM printed by the program")) is None


def test_metrics_over_which_ncu_stops() -> None:
    assert ncu.refused_metrics("==ERROR== Failed to find metric regex:^lts__t_bytes(\\.(sum|avg))?$") == {
        "lts__t_bytes"
    }
    assert ncu.refused_metrics("==ERROR== Failed to find metric sm__x.sum\n") == {"sm__x"}
    assert ncu.refused_metrics("==PROF== fine") == frozenset()


def test_ncu_is_asked_what_it_knows(tmp_path: Path) -> None:
    script = tmp_path / "ncu"
    script.write_text('#!/bin/sh\necho "Chip $3"\necho "---"\necho "dram__bytes   Counter  byte  # of bytes in DRAM"\n')
    script.chmod(0o755)
    assert ncu.known_metrics(str(script), "gh100") == {"dram__bytes"}
    script.write_text("#!/bin/sh\necho '==ERROR== unknown chip'; exit 1\n")
    assert ncu.known_metrics(str(script), "gh100") is None
    assert ncu.known_metrics(str(tmp_path / "nothing"), None) is None
