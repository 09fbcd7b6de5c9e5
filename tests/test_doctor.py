import base64
import hashlib
import subprocess
import sys
import time

import pytest

from jfabench import doctor
from jfabench.doctor import TritonOwner, repair_commands, repair_triton, triton_clash, triton_owners

# Who owns triton/ -----------------------------------------------------------------------------------------------------


def install(site, name, version, files):
    """Writes what pip writes: the files, and a dist-info whose RECORD lists their hashes and sizes."""
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [f"{info.name}/METADATA,,", f"{info.name}/RECORD,,"]
    for path, text in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        lines.append(f"{path},sha256={digest},{len(text)}")
    (info / "RECORD").write_text("\n".join(lines) + "\n")


OURS = {"triton/__init__.py": "fork = 1\n", "triton/language/extra/tlx/__init__.py": "tlx = 1\n"}
THEIRS = {"triton/__init__.py": "main = 1\n"}
UNINSTALL, INSTALL = "pip uninstall -y triton", "pip install --force-reinstall --no-deps fbtriton==3.7.4"


def clash(site):
    return triton_clash(triton_owners([str(site)]))


def test_fbtriton_alone_is_fine(tmp_path):
    install(tmp_path, "fbtriton", "3.7.4", OURS)
    assert triton_owners([str(tmp_path)]) == (TritonOwner("fbtriton", "3.7.4", True),)
    assert clash(tmp_path).status == "ok"
    assert repair_commands(triton_owners([str(tmp_path)])) == []


def test_both_with_upstream_written_last(tmp_path):
    install(tmp_path, "fbtriton", "3.7.4", OURS)
    install(tmp_path, "triton", "3.6.0", THEIRS)
    finding = clash(tmp_path)
    assert finding.status == "fail"
    assert "fbtriton 3.7.4 and triton 3.6.0" in finding.detail
    assert "the files are those of triton" in finding.detail
    assert finding.remedy == f"{UNINSTALL} && {INSTALL}"


def test_both_with_fbtriton_written_last(tmp_path):
    install(tmp_path, "triton", "3.6.0", THEIRS)
    install(tmp_path, "fbtriton", "3.7.4", OURS)
    finding = clash(tmp_path)
    assert finding.status == "fail"  # uninstalling triton would still tear fbtriton apart
    assert "the files are those of fbtriton" in finding.detail
    assert finding.remedy == f"{UNINSTALL} && {INSTALL}"


def test_both_mixed(tmp_path):
    install(tmp_path, "fbtriton", "3.7.4", {**OURS, "triton/a.py": "1\n"})
    install(tmp_path, "triton", "3.6.0", {**THEIRS, "triton/b.py": "1\n"})
    (tmp_path / "triton/b.py").unlink()
    assert "a mixture" in clash(tmp_path).detail


def test_what_uninstalling_upstream_leaves_behind(tmp_path):
    install(tmp_path, "fbtriton", "3.7.4", OURS)
    (tmp_path / "triton/__init__.py").unlink()
    finding = clash(tmp_path)
    assert finding.status == "fail"
    assert "overwritten or removed" in finding.detail
    assert finding.remedy == INSTALL


def test_a_file_of_the_same_size_from_elsewhere_is_noticed(tmp_path):
    install(tmp_path, "fbtriton", "3.7.4", OURS)
    (tmp_path / "triton/__init__.py").write_text("fork = 2\n")
    assert triton_owners([str(tmp_path)])[0].intact is False


@pytest.mark.parametrize("name", ["triton", "pytorch-triton"])
def test_only_upstream(tmp_path, name):
    install(tmp_path, name.replace("-", "_"), "3.6.0", THEIRS)
    finding = clash(tmp_path)
    assert "no TLX" in finding.detail
    assert finding.remedy == f"pip uninstall -y {name} && {INSTALL}"


def test_neither(tmp_path):
    assert clash(tmp_path).status == "fail"
    assert clash(tmp_path).remedy == INSTALL


def test_a_distribution_without_a_list_of_files_is_not_called_broken(tmp_path):
    install(tmp_path, "fbtriton", "3.7.4", {})
    (tmp_path / "fbtriton-3.7.4.dist-info" / "RECORD").unlink()
    assert triton_owners([str(tmp_path)]) == (TritonOwner("fbtriton", "3.7.4", None),)
    assert clash(tmp_path).status == "ok"


# Repair ---------------------------------------------------------------------------------------------------------------

BOTH = (TritonOwner("fbtriton", "3.8.0", False), TritonOwner("triton", "3.6.0", True))


class Runner:
    def __init__(self, *statuses):
        self.commands, self.statuses = [], list(statuses)

    def __call__(self, command):
        self.commands.append(list(command))
        return self.statuses.pop(0) if self.statuses else 0


def test_repair_runs_both_commands_with_this_interpreter():
    run = Runner()
    said = repair_triton(run, BOTH)
    pip = [sys.executable, "-m", "pip"]
    assert run.commands == [
        [*pip, "uninstall", "-y", "triton"],
        [*pip, "install", "--force-reinstall", "--no-deps", "fbtriton==3.8.0"],
    ]
    assert "repaired" in said


def test_repair_uses_uv_where_there_is_no_pip(monkeypatch):
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/bin/uv" if name == "uv" else None)
    run = Runner()
    repair_triton(run, BOTH)
    uv = ["/bin/uv", "pip"]
    assert run.commands == [
        [*uv, "uninstall", "--python", sys.executable, "triton"],  # uv asks nothing and has no -y
        [*uv, "install", "--python", sys.executable, "--force-reinstall", "--no-deps", "fbtriton==3.8.0"],
    ]


def test_repair_without_any_installer_says_what_to_do(monkeypatch):
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match="ensurepip"):
        repair_triton(Runner(), BOTH)


def test_repair_stops_at_a_command_that_fails():
    run = Runner(1)
    with pytest.raises(RuntimeError, match="uninstall -y triton` failed with exit status 1"):
        repair_triton(run, BOTH)
    assert len(run.commands) == 1


def test_nothing_to_repair_runs_nothing():
    run = Runner()
    assert "nothing to repair" in repair_triton(run, [TritonOwner("fbtriton", "3.7.4", True)])
    assert run.commands == []


# The other findings ---------------------------------------------------------------------------------------------------

GOOD = {
    "version": "2.11.0",
    "cuda": "13.0",
    "available": True,
    "devices": ["NVIDIA H200"],
    "capability": [9, 0],
    "cupti": True,
}


@pytest.mark.parametrize(
    ("probe", "has_gpu", "status", "words"),
    [
        (GOOD, True, "ok", "2.11.0, CUDA 13.0, sees NVIDIA H200 (sm_90)"),
        ({**GOOD, "available": False}, True, "fail", "sees no GPU"),
        ({**GOOD, "available": False}, False, "ok", "sees no GPU"),
        ({**GOOD, "available": False, "cuda": None}, True, "fail", "without CUDA"),
        ({**GOOD, "available": False, "cuda": None}, False, "ok", "without CUDA"),
        ({"error": "ImportError: libcudart"}, False, "fail", "libcudart"),
    ],
)
def test_torch(probe, has_gpu, status, words):
    finding = doctor._torch(probe, has_gpu)
    assert finding.status == status
    assert words in finding.detail
    assert bool(finding.remedy) == (status == "fail")


@pytest.mark.parametrize(
    ("probe", "has_gpu", "status"),
    [
        (GOOD, True, "ok"),
        ({**GOOD, "cupti": False}, True, "fail"),
        ({"error": "x"}, True, "fail"),
        (GOOD, False, "absent"),
    ],
)
def test_cupti(probe, has_gpu, status):
    assert doctor._cupti(probe, has_gpu).status == status


@pytest.mark.parametrize(
    ("probe", "status"),
    [
        ({"version": "3.7.4", "tlx": True}, "ok"),
        ({"version": "3.6.0", "tlx": "ModuleNotFoundError: tlx"}, "fail"),
        ({"error": "ImportError: libtriton"}, "fail"),
    ],
)
def test_tlx(probe, status):
    finding = doctor._tlx(probe)
    assert finding.status == status
    assert ("--repair" in finding.remedy) == (status == "fail")


@pytest.mark.parametrize(
    ("params", "capabilities", "status"),
    [
        ("RmProfilingAdminOnly: 0\n", "0000000000000000", "ok"),
        ("RmProfilingAdminOnly: 1\n", "000001ffffffffff", "ok"),
        ("RmProfilingAdminOnly: 1\n", "00000000a80425fb", "warn"),  # root in a Docker container
        ("Other: 1\n", "000001ffffffffff", "warn"),
        (None, "000001ffffffffff", "warn"),
    ],
)
def test_counter_permission(tmp_path, params, capabilities, status):
    if params is not None:
        (tmp_path / "params").write_text(f"ResmanDebugLevel: 4294967295\n{params}")
    (tmp_path / "status").write_text(f"Name:\tx\nCapEff:\t{capabilities}\n")
    finding = doctor.counter_permission(tmp_path / "params", tmp_path / "status")
    assert finding.status == status
    assert bool(finding.remedy) == (status == "warn")


def test_a_compiler_that_does_not_exist_is_a_finding(monkeypatch):
    monkeypatch.setenv("CC", "/no/such/cc")
    assert (doctor._compiler().status, "CC=/no/such/cc" in doctor._compiler().detail) == ("fail", True)
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", "/nowhere")
    assert "no C compiler" in doctor._compiler().detail


def test_missing_python_headers_are_a_finding(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("CC", sys.executable)
    assert "Python.h is missing" in doctor._compiler().detail


@pytest.mark.parametrize(
    ("script", "status", "detail"),
    [("echo 'Version 2025.3.1.0 (build 1)'", "ok", "2025.3.1.0 at "), ("exit 1", "fail", "does not start")],
)
def test_ncu(monkeypatch, tmp_path, script, status, detail):
    ncu = tmp_path / "ncu"
    ncu.write_text(f"#!/bin/sh\n{script}\n")
    ncu.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    finding = doctor._ncu()
    assert finding.status == status
    assert detail in finding.detail


@pytest.mark.parametrize(("free", "status"), [(50e6, "fail"), (500e6, "warn"), (5e9, "ok")])
def test_disk(monkeypatch, tmp_path, free, status):
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: type("Usage", (), {"free": free}))
    assert doctor._disk(tmp_path).status == status


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("raise ImportError('libcudart is gone')", "ImportError: libcudart is gone"),
        ("import os; os.kill(os.getpid(), 11)", "killed by signal 11"),
        ("import time; time.sleep(60)", "no answer within 1 s"),
    ],
)
def test_what_breaks_in_a_probe_is_told(monkeypatch, code, error):
    monkeypatch.setattr(doctor, "_PROBE_SECONDS", 1)
    assert doctor._Probe(code).answer() == {"error": error}


def test_a_probe_may_print_before_its_answer():
    probe = doctor._Probe("print('warning: x'); print('{\"a\": 1}')")
    assert probe.answer() == probe.answer() == {"a": 1}


def test_the_whole_examination_is_quick_and_complete():
    begin = time.monotonic()
    findings = doctor.examine()
    assert time.monotonic() - begin < 20  # about 2 s on an idle machine
    names = [finding.name for finding in findings]
    assert len(set(names)) == len(names)
    assert {"Python", "GPU", "NVIDIA driver", "torch", "triton", "TLX", "Nsight Compute", "CUPTI", "disk"} <= set(names)
    assert not [finding for finding in findings if "this check itself failed" in finding.detail]
    assert not [finding for finding in findings if finding.status in ("fail", "warn") and not finding.remedy]


def test_a_check_that_crashes_is_a_finding(monkeypatch):
    monkeypatch.setattr(doctor, "triton_owners", lambda: 1 / 0)
    (finding,) = (finding for finding in doctor.examine() if finding.name == "triton")
    assert "ZeroDivisionError" in finding.detail


def test_the_doctor_itself_imports_neither_torch_nor_triton():
    code = "import sys; from jfabench import doctor; doctor.examine(); print({'torch', 'triton'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
