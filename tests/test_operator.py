"""Plug-ins: one that cannot be used is told of, and never in the way of the others."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from jfabench.operator import load_operator, load_providers

GOOD = """
class Mine:
    name, operator, summary = "mine", "jagged_attention", "nothing"
    def unavailable(self, device): ...
    def unsupported(self, params, direction): ...
    def prepare(self, inputs, direction): ...
"""


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("PROVIDERS = (Mine,)", "holds the class Mine"),
        ("PROVIDERS = Mine()", "not iterable"),
        ("PROVIDERS = (object(),)", "no 'name'"),
        ("Mine.summary = 3\nPROVIDERS = (Mine(),)", "no 'summary'"),
        ("del Mine.prepare\nPROVIDERS = (Mine(),)", "no method prepare()"),
        ("Mine.name = 'reference'\nPROVIDERS = (Mine(),)", "exists already"),
        ("raise RuntimeError('boom')", "boom"),
        ("import sys; sys.exit(0)", "SystemExit"),
        ("", "PROVIDERS"),
    ],
)
def test_a_broken_plugin_is_named_and_the_rest_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, why: str
) -> None:
    (tmp_path / "broken_plugin.py").write_text(GOOD + body)
    info = tmp_path / "broken-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[jfabench.providers]\nbroken = broken_plugin\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "broken_plugin", raising=False)
    providers = load_providers("jagged_attention")
    monkeypatch.delitem(sys.modules, "broken_plugin", raising=False)
    assert [(plugin.name, why in plugin.why) for plugin in providers.broken] == [("broken_plugin", True)], (
        providers.broken
    )
    assert {"reference", "sdpa_padded", "triton_jfa"} <= set(providers.by_name)
    assert "mine" not in providers.by_name


def test_an_unknown_operator_names_the_known_ones() -> None:
    with pytest.raises(KeyError, match="jagged_attention"):
        load_operator("nope")
