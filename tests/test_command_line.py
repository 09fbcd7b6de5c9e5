"""What commands share: the same option says the same, and leads to the same sweep and device, in all of them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from jfabench import command_line
from jfabench.cli import build_parser, main
from jfabench.command_line import CommandError


def parsers() -> dict[str, argparse.ArgumentParser]:
    """Of all commands, and of the actions of `history`, by name."""
    found: dict[str, argparse.ArgumentParser] = {}

    def add(parser: argparse.ArgumentParser, prefix: str) -> None:
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for name, sub in action.choices.items():
                    found[prefix + name] = sub
                    add(sub, f"{prefix}{name} ")

    add(build_parser(), "")
    return found


PARSERS = parsers()


def with_option(flag: str) -> dict[str, argparse.Action]:
    """The option of this name, by command."""
    return {
        name: action for name, parser in PARSERS.items() for action in parser._actions if flag in action.option_strings
    }


@pytest.mark.parametrize(
    ("flag", "commands"),
    [
        ("--config", {"sweep", "profile", "timeline", "waterfall", "nightly"}),
        ("--set", {"sweep", "profile", "timeline", "waterfall", "nightly", "compare"}),
        ("--direction", {"sweep", "profile", "timeline", "waterfall", "compare"}),
        ("--only", {"sweep", "profile", "compare"}),
        ("--device", {"sweep", "ceilings", "nightly", "compare"}),
        ("--measure", {"sweep", "compare"}),
    ],
)
def test_the_same_option_says_the_same(flag: str, commands: set[str]) -> None:
    options = with_option(flag)
    assert commands <= options.keys()
    alike = [options[name] for name in commands]
    assert len({(option.help, option.metavar, option.dest, option.type) for option in alike}) == 1
    told = [options[name] for name in commands - {"compare"}]  # which sets its defaults later, to tell what was given
    assert len({str(option.default) for option in told}) == 1


@pytest.mark.parametrize(
    "words",
    [
        ["sweep", "--config", "jagged.yaml"],
        ["profile", "--config", "jagged.yaml"],
        ["report", "results/a"],
        ["ceilings"],
        ["inspect"],
        ["timeline", "--config", "jagged.yaml"],
        ["waterfall", "--config", "jagged.yaml"],
        ["schedule", "--config", "jagged.yaml"],
        ["compare", "a", "b"],
        ["history", "report"],
        ["nightly", "--config", "nightly.yaml"],
    ],
    ids=lambda words: " ".join(words[:2]) if words[0] == "history" else words[0],
)
def test_a_folder_without_a_name_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for blank in ("", "  "):
        assert main([*words, "--out", blank]) == 2
        assert capsys.readouterr().err == "jfabench: --out needs the name of a folder\n"


def test_every_out_is_one_of_those() -> None:
    """So that the test above need not know of commands to come."""
    assert {action.type for action in with_option("--out").values()} == {command_line._folder}


def test_a_new_folder_has_the_time_in_its_name() -> None:
    assert command_line.new_folder(Path("mine"), "compare") == Path("mine")
    parent, name = command_line.new_folder(None, "compare").parts
    assert parent == "results"
    kind, day, time = name.split("-")
    assert (kind, len(day), len(time)) == ("compare", 8, 6)
    assert (day + time).isdigit()


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "two", "", "²"])
def test_what_is_no_whole_number(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected a whole number, at least 1"):
        command_line.whole_number(1)(text)


def test_whole_numbers() -> None:
    assert command_line.whole_number(1)("1") == 1
    assert command_line.whole_number(0)("0") == 0


@pytest.mark.parametrize("text", ["0", "-1", "inf", "nan", "soon", ""])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected a positive number of seconds"):
        command_line.seconds(text)


def test_times_may_be_less_than_a_second_and_are_of_one_kind() -> None:
    assert command_line.seconds("0.5") == 0.5
    timeouts = with_option("--timeout")
    assert {name: option.default for name, option in timeouts.items()} == {
        "sweep": 300.0,
        "profile": 600.0,
        "compare": None,  # see `compare_command.DEFAULTS`
        "nightly": 300.0,
    }
    assert {option.type for option in timeouts.values()} == {command_line.seconds}


# From options to what is to be done ----------------------------------------------------------------------------------


def options(**given: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"config": "jagged.yaml", "settings": [], "device": "cpu", **given})


def test_options_change_the_sweep() -> None:
    sweep = command_line.load(
        options(
            settings=["lengths.max_len=64"],
            only=["reference", "sdpa_padded"],
            skip=["reference"],
            direction=["bwd"],
            measure="events",
            workers="shared",
        )
    )
    assert sweep.scale == "full"
    assert sweep.config.providers == ["sdpa_padded"]
    assert sweep.config.measure.mode == "events"
    assert sweep.config.workers == "shared"
    assert {case.direction for case in sweep.cases} == {"bwd"}
    assert {case.params["lengths"]["max_len"] for case in sweep.cases} == {64}


def test_options_that_a_command_lacks_change_nothing() -> None:
    sweep = command_line.load(options())
    whole = command_line.load(options(only=[], skip=[], direction=[], measure=None, workers=None))
    assert sweep == whole
    assert command_line.load(options(), only=["tlx_jfa"]).config.providers == ["tlx_jfa"]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"config": "nowhere.yaml"}, "no sweep file 'nowhere.yaml', as a path or in sweeps/"),
        ({"settings": ["no=1"]}, "--set no=1: unknown key 'no'"),
        ({"settings": ["batch"]}, "--set batch: expected key=value"),
        ({"only": ["nobody"]}, "--only: unknown provider 'nobody'"),
        ({"skip": ["nobody"]}, "--skip: unknown provider 'nobody'"),
        ({"measure": "events"}, "measure mode 'events' needs a CUDA device; on a CPU use 'wall'"),
    ],
)
def test_what_is_not_valid_is_code_2(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(CommandError) as raised:
        command_line.load_and_choose_device(options(**given))
    assert str(raised.value).startswith(sentence)
    assert raised.value.code == 2


COMMANDS_ON_A_DEVICE = {
    "sweep": ["--config", "jagged.yaml"],
    "profile": ["--config", "jagged.yaml"],
    "ceilings": [],
    "timeline": ["--config", "jagged.yaml"],
    "compare": ["--aa", "--config", "jagged.yaml"],
    "nightly": ["--config", "nightly.yaml"],
}


def test_those_are_all_commands_on_a_device() -> None:
    assert with_option("--device").keys() == COMMANDS_ON_A_DEVICE.keys()


@pytest.mark.parametrize("command", COMMANDS_ON_A_DEVICE)
@pytest.mark.parametrize("device", ["gpu", "cuda:x"])
def test_what_names_no_device_is_code_2(
    command: str, device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [command, *COMMANDS_ON_A_DEVICE[command], "--out", str(tmp_path / "out"), "--device", device]
    assert main(words) == 2
    sentence = f"jfabench: --device {device!r}: expected auto, cpu, cuda or cuda:N, such as cuda:1\n"
    assert capsys.readouterr().err == sentence
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", COMMANDS_ON_A_DEVICE)
def test_a_device_that_there_is_not_is_code_3(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("jfabench.devices.gpu_names", lambda: ["an H200"])
    monkeypatch.setattr("jfabench.devices.torch_cuda_devices", lambda: 1)
    words = [command, *COMMANDS_ON_A_DEVICE[command], "--out", str(tmp_path / "out"), "--device", "cuda:7"]
    assert main(words) == 3
    assert "--device cuda:7: torch sees 1 CUDA device(s), numbered from 0" in capsys.readouterr().err


def test_the_device_decides_the_scale_and_is_told_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep, device = command_line.load_and_choose_device(options())
    assert (sweep.scale, device) == ("cpu", "cpu")
    assert capsys.readouterr().out.startswith("Running on the CPU")
    monkeypatch.setattr("jfabench.devices.choose_device", lambda wanted: (wanted, ""))
    sweep, device = command_line.load_and_choose_device(options(device="cuda:1", measure="cudagraph"))
    assert (sweep.scale, device) == ("full", "cuda:1")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("device", "names", "usable", "reason"),
    [
        ("cpu", ["NVIDIA H200"], 1, "--device cpu is none"),
        (None, [], 0, "no NVIDIA GPU found"),
        ("auto", [], 0, "no NVIDIA GPU found"),
        ("cuda", [], 0, "no NVIDIA GPU found"),
        ("auto", ["an H200"], 0, "an H200 found, but this torch cannot use it (`python -m jfabench doctor` says why)"),
        ("cuda:2", ["an H200"], 1, "--device cuda:2: torch sees 1 CUDA device(s), numbered from 0"),
    ],
)
def test_why_there_is_no_gpu_of_hopper(
    device: str | None, names: list[str], usable: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jfabench.devices.gpu_names", lambda: names)
    monkeypatch.setattr("jfabench.devices.torch_cuda_devices", lambda: usable)
    given = options(device=device)
    if device is None:  # the command has no such option
        del given.device
    with pytest.raises(CommandError) as raised:
        command_line.load_for_hopper(given, "a timeline is recorded inside", only=["tlx_jfa"])
    assert str(raised.value) == (
        "a timeline is recorded inside the TLX kernels on a GPU of sm_90, and there is none that can be used here "
        f"({reason}): run it on an H100 or H200 (`python -m jfabench doctor` says what is missing)"
    )
    assert raised.value.code == 3


def test_what_needs_a_gpu_of_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jfabench.devices.choose_device", lambda wanted: (wanted, ""))
    sweep, device = command_line.load_for_hopper(options(device="cuda:1"), "", only=["tlx_jfa"])
    assert (sweep.scale, sweep.config.providers, device) == ("full", ["tlx_jfa"], "cuda:1")


@pytest.mark.parametrize("command", ["nightly", "profile", "sweep"])
def test_a_measure_that_needs_a_gpu_is_refused_before_anything_runs(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--config", "nightly.yaml", "--device", "cpu", "--set", "measure.mode=events"]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err
