from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from jfabench.sweep import ConfigError, load_sweep, lookup, shipped

BASE: dict[str, Any] = {
    "operator": "jagged_attention",
    "baseline": "sdpa_padded",
    "providers": ["sdpa_padded", "reference"],
    "directions": ["fwd", "bwd"],
    "params": {
        "batch": 4,
        "heads": 2,
        "head_dim": 64,
        "dtype": "bf16",
        "broadcast_q": True,
        "q_len": 16,
        "lengths": {"kind": "fill"},
    },
    "axes": {"lengths.max_len": [32, 64], "lengths.fill": [0.1, 0.9]},
}


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "my.yaml"
    path.write_text(text)
    return str(path)


def changed(tmp_path: Path, **changes: Any) -> str:
    return write(tmp_path, yaml.safe_dump({**BASE, **changes}, sort_keys=False))


def test_a_grid_is_the_product_of_its_axes_times_directions_and_providers(tmp_path: Path) -> None:
    sweep = load_sweep(changed(tmp_path))
    points = [
        (c.params["lengths"]["max_len"], c.params["lengths"]["fill"], c.direction, c.provider) for c in sweep.cases
    ]
    assert points == [
        (n, fill, direction, provider)
        for n in (32, 64)
        for fill in (0.1, 0.9)
        for direction in ("fwd", "bwd")
        for provider in ("sdpa_padded", "reference")
    ]


def test_overrides_apply_where_all_conditions_hold(tmp_path: Path) -> None:
    overrides = [{"when": {"lengths.max_len": 64, "lengths.fill": [0.9, 1.0]}, "set": {"batch": 2}}]
    batches = {
        (c.params["lengths"]["max_len"], c.params["lengths"]["fill"]): c.params["batch"]
        for c in load_sweep(changed(tmp_path, overrides=overrides)).cases
    }
    assert batches == {(32, 0.1): 4, (32, 0.9): 4, (64, 0.1): 4, (64, 0.9): 2}


def test_points_that_an_override_makes_equal_are_measured_once(tmp_path: Path) -> None:
    overrides = [{"when": {"lengths.max_len": [32, 64]}, "set": {"lengths.max_len": 16}}]
    assert len(load_sweep(changed(tmp_path, overrides=overrides)).cases) == 2 * 2 * 2


def test_the_cpu_scale_replaces_parameters_axes_and_providers(tmp_path: Path) -> None:
    cpu = {
        "params": {"batch": 1, "lengths.fill": 0.5},
        "axes": {"lengths.max_len": [8]},
        "providers": ["reference"],
        "baseline": "reference",
    }
    path = changed(tmp_path, cpu=cpu, measure={"mode": "events"})
    sweep = load_sweep(path, "cpu")
    assert [(c.params["batch"], c.params["lengths"]["max_len"], c.params["lengths"]["fill"]) for c in sweep.cases] == [
        (1, 8, 0.5)
    ] * 2
    assert {c.provider for c in sweep.cases} == {"reference"}
    assert sweep.config.measure.mode_on("cpu") == "wall"
    assert len(load_sweep(path, "full").cases) == 16


@pytest.mark.parametrize(
    ("setting", "dotted", "values"),
    [
        ("batch=2", "batch", {2}),
        ("lengths.max_len=16", "lengths.max_len", {16}),
        ("axes.q_len=[1,2]", "q_len", {1, 2}),
        ("params.heads=4", "heads", {4}),
        ("causal=true", "causal", {True}),
    ],
)
def test_settings_reach_parameters_and_axes(tmp_path: Path, setting: str, dotted: str, values: set[Any]) -> None:
    sweep = load_sweep(changed(tmp_path), settings=[setting])
    assert {lookup(case.params, dotted) for case in sweep.cases} == values


def test_settings_win_over_the_overrides_of_the_file(tmp_path: Path) -> None:
    overrides = [{"when": {"lengths.max_len": 64}, "set": {"batch": 2, "heads": 1}}]
    sweep = load_sweep(changed(tmp_path, overrides=overrides), settings=["batch=3"])
    assert {(c.params["batch"], c.params["heads"]) for c in sweep.cases} == {(3, 2), (3, 1)}


def test_each_shape_has_its_own_worker_unless_a_file_or_a_setting_says_otherwise(tmp_path: Path) -> None:
    assert load_sweep(changed(tmp_path)).config.workers == "per_shape"
    assert load_sweep(changed(tmp_path), settings=["workers=shared"]).config.workers == "shared"
    assert load_sweep(changed(tmp_path, workers="shared"), "full").config.workers == "shared"
    with pytest.raises(ConfigError, match="did you mean `per_shape`"):
        load_sweep(changed(tmp_path, workers="per-shape"))


def test_settings_reach_other_fields(tmp_path: Path) -> None:
    sweep = load_sweep(changed(tmp_path), settings=["seed=7", "measure.target=0.05", "directions=[fwd_bwd]"])
    assert {case.seed for case in sweep.cases} == {7}
    assert {case.direction for case in sweep.cases} == {"fwd_bwd"}
    assert sweep.config.measure.target == 0.05


def test_only_skip_and_direction_choose_cases(tmp_path: Path) -> None:
    path = changed(tmp_path)
    assert {c.provider for c in load_sweep(path, only=["triton_jfa"]).cases} == {"triton_jfa"}
    assert {c.provider for c in load_sweep(path, skip=["reference"]).cases} == {"sdpa_padded"}
    assert {c.direction for c in load_sweep(path, directions=["bwd"]).cases} == {"bwd"}
    with pytest.raises(ConfigError, match="no provider is left"):
        load_sweep(path, skip=["reference", "sdpa_padded"])


def test_overrides_match_defaults_too(tmp_path: Path) -> None:
    overrides = [{"when": {"causal": False, "kv_heads": 2}, "set": {"batch": 1}}]
    assert {case.params["batch"] for case in load_sweep(changed(tmp_path, overrides=overrides)).cases} == {1}


def test_a_file_of_lengths_has_one_name_however_its_sweep_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.csv").write_text("length\n3\n0\n7\n")
    params = {**BASE["params"], "lengths": {"kind": "file", "path": "mine.csv"}}
    del params["batch"]
    absolute = changed(tmp_path, params=params, axes={})
    monkeypatch.chdir(tmp_path)
    named = [load_sweep(name).cases for name in (absolute, "my.yaml", "./my.yaml")]
    assert named[0] == named[1] == named[2]
    assert named[0][0].params["lengths"]["path"] == "mine.csv"


@pytest.mark.parametrize("name", shipped())
@pytest.mark.parametrize("scale", ["full", "cpu"])
def test_shipped_files_are_valid_at_both_scales(name: str, scale: Any) -> None:
    sweep = load_sweep(name, scale)
    assert sweep.cases
    assert load_sweep(name.removesuffix(".yaml"), scale).cases == sweep.cases


def test_the_jagged_grid_is_the_published_one() -> None:
    cases = load_sweep("jagged.yaml").cases
    assert {case.params["lengths"]["max_len"] for case in cases} == {512, 1024, 2048, 4096, 8192}
    assert {case.params["lengths"]["fill"] for case in cases} == {0.1, 0.5, 0.9}
    assert {case.params["q_len"] for case in cases} == {64, 256, 512}
    assert {(p["heads"], p["head_dim"], p["batch"], p["dtype"]) for p in (c.params for c in cases)} == {
        (4, 128, 768, "bf16")
    }


# Every kind of malformed file: the message names the file, the key and what would be valid ---------------------------


def broken(**changes: Any) -> str:
    return yaml.safe_dump({**BASE, **changes}, sort_keys=False)


def without(*keys: str) -> str:
    return yaml.safe_dump({key: value for key, value in BASE.items() if key not in keys}, sort_keys=False)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ["expected a mapping", "nothing"]),
        ("- a\n- b\n", ["expected a mapping", "list"]),
        ("operator: [unclosed\n", ["not valid YAML"]),
        ("operator: a\noperator: b\n", ["my.yaml:2", "`operator`", "twice", "line 1"]),
        (without("operator"), ["`operator`", "required"]),
        (without("providers"), ["`providers`", "required"]),
        (broken(providrs=["reference"]), ["`providrs`", "unknown key", "`providers`"]),
        (broken(operator="jaged_attention"), ["`operator`", "unknown", "jagged_attention"]),
        (broken(providers=["sdpa_paded"]), ["`providers.0`", "did you mean `sdpa_padded`?"]),
        (broken(providers=[]), ["`providers`"]),
        (broken(providers="reference"), ["`providers`", "list"]),
        (broken(baseline="fa5"), ["`baseline`", "unknown provider", "fa4"]),
        (broken(directions=["forward"]), ["`directions.0`", "fwd"]),
        (broken(axes={"lengths.fill": []}), ["`axes.lengths.fill`", "at least one value"]),
        (broken(axes={"lengths.fill": 0.5}), ["`axes.lengths.fill`", "list"]),
        (broken(axes={"lengths.fil": [0.5]}), ["axes.lengths.fil", "unknown key", "did you mean `fill`?"]),
        (broken(axes={**BASE["axes"], "head_dims": [64]}), ["axes.head_dims", "did you mean `head_dim`?"]),
        (broken(params={**BASE["params"], "head": 2}), ["`params.head`", "did you mean `heads`?"]),
        (broken(params={**BASE["params"], "head_dim": 96}), ["`params.head_dim`", "64", "128"]),
        (broken(params={**BASE["params"], "heads": "four"}), ["`params.heads`", "integer", "'four'"]),
        (broken(params={**BASE["params"], "heads": 3, "kv_heads": 2}), ["heads"]),
        (broken(params={**BASE["params"], "q_len": 0}), ["`params.q_len`", "greater than"]),
        (broken(params={**BASE["params"], "lengths": {"kind": "fil"}}), ["`params.lengths`", "fill"]),
        (broken(params={**BASE["params"], "dtype": "fp8"}), ["`params.dtype`", "bf16"]),
        (broken(measure={"mode": "profile"}), ["`measure.mode`", "did you mean `profiler`?"]),
        (broken(measure={"targt": 0.1}), ["`measure.targt`", "did you mean `target`?"]),
        (broken(measure={"target": 2}), ["`measure.target`", "less than"]),
        (broken(overrides=[{"when": {}, "set": {"batch": 1}}]), ["`overrides.0.when`"]),
        (broken(overrides=[{"if": {"batch": 1}, "set": {"batch": 1}}]), ["`overrides.0.if`", "unknown key"]),
        (broken(overrides=[{"when": {"length.fill": 0.1}, "set": {"batch": 1}}]), ["overrides.0.when", "`lengths`"]),
        (broken(overrides=[{"when": {"batch": 4}, "set": {"lengths.fil": 1}}]), ["overrides.0.set", "`fill`"]),
        (
            broken(params={**BASE["params"], "batch": 10**7}, axes={"lengths.max_len": [10**5], "lengths.fill": [1]}),
            ["impossible inputs"],
        ),
        (
            broken(axes={"lengths": [{"kind": "constant", "length": 8}], "lengths.fill": [0.5]}),
            ["conflicts with the axis"],
        ),
        (broken(axes={"seed_": [1]}), ["axes.seed_", "unknown key"]),
        (broken(axes={"batch": list(range(1, 402)), "heads": list(range(1, 251))}), ["100,250 points"]),
        (broken(seed=10**30), ["`seed`", "less than"]),
        (broken(measure={"max_seconds": float("inf")}), ["`measure.max_seconds`", "finite"]),
        (broken(params={**BASE["params"], "window": [10**20, 3]}), ["too large"]),
        ("params: &a {lengths: *a}\n", ["nested"]),
        ("a: " + "[" * 3000, ["nested"]),
        ("description: 2026-99-99\n", ["not valid YAML", "month"]),
        (
            "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9)),
            ["more than 100,000 values"],
        ),
        (broken(cpu={"provider": ["reference"]}), ["`cpu.provider`", "did you mean `providers`?"]),
        (broken(seed=-1), ["`seed`"]),
    ],
)
def test_a_malformed_file_is_explained(tmp_path: Path, text: str, expected: list[str]) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as raised:
        load_sweep(path)
    message = str(raised.value)
    assert message.startswith(path), message
    assert "\n" not in message
    for part in expected:
        assert part in message, message


def test_errors_in_the_cpu_scale_name_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"`cpu.measure.rounds`"):
        load_sweep(changed(tmp_path, cpu={"measure": {"rounds": 0}}), "cpu")
    with pytest.raises(ConfigError, match="declares no `cpu:` scale"):
        load_sweep(changed(tmp_path), "cpu")


def test_the_line_of_the_wrong_key_is_named(tmp_path: Path) -> None:
    text = without("axes") + "axes:\n  lengths.max_len: [32]\n  lengths.fill: [0.5, nine]\n"
    line = text.splitlines().index("  lengths.fill: [0.5, nine]") + 1
    with pytest.raises(ConfigError, match=f"my.yaml:{line}: "):
        load_sweep(write(tmp_path, text))


@pytest.mark.parametrize("file", ["jagged.yaml", "dense.yaml", "nightly.yaml", "counters.yaml"])
def test_every_valid_key_is_listed_once(file: str) -> None:
    with pytest.raises(ConfigError) as failure:
        load_sweep(file, settings=["q=1"])
    listed = str(failure.value).partition("; valid: ")[2].split(", ")
    assert {"batch", "q_len", "measure"} <= set(listed)
    assert len(listed) == len(set(listed))


def test_unknown_names_get_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"did you mean `jagged.yaml`\?"):
        load_sweep("jaged.yaml")
    with pytest.raises(ConfigError, match=r"--only: unknown provider 'fa44'.*`fa4`"):
        load_sweep("jagged.yaml", only=["fa44"])
    with pytest.raises(ConfigError, match=r"--set bach=3: unknown key 'bach'.*`batch`"):
        load_sweep("jagged.yaml", settings=["bach=3"])
    with pytest.raises(ConfigError, match=r"conflicts with the axis `lengths.fill`"):
        load_sweep("jagged.yaml", settings=["lengths.fill.x=3"])
    with pytest.raises(ConfigError, match="expected key=value"):
        load_sweep("jagged.yaml", settings=["batch"])
    with pytest.raises(ConfigError, match=r"--set.*measure.target"):
        load_sweep("jagged.yaml", settings=["measure.target=no"])


def test_a_file_of_lengths_stands_beside_the_sweep_file(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text("length\n3\n0\n7\n")
    params = {**BASE["params"], "lengths": {"kind": "file", "path": "mine.csv"}}
    del params["batch"]
    sweep = load_sweep(changed(tmp_path, params=params, axes={}))
    assert {case.params["batch"] for case in sweep.cases} == {3}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(key=st.sampled_from([*BASE, "cpu", "measure", "overrides", "seed"]), value=json_values)
def test_no_value_of_any_key_escapes_as_another_error(tmp_path_factory: Any, key: str, value: Any) -> None:
    path = tmp_path_factory.mktemp("yaml") / "any.yaml"
    path.write_text(yaml.safe_dump({**BASE, key: value}, allow_unicode=True))
    for scale in ("full", "cpu"):
        try:
            load_sweep(str(path), scale)  # type: ignore[arg-type]
        except ConfigError as error:
            assert str(error).startswith(str(path))  # noqa: PT017
