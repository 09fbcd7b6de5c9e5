"""Runs a module of a source tree as if that tree were installed: `python -P from_tree.py TREE COMMIT MODULE ...`.

Two revisions of jfabench can so be measured in turns, in one environment. `PYTHONPATH` is not enough for that: the
top-level folders of a tree are packages of `jfabench` by a mapping in its `pyproject.toml`, and an editable install of
another tree answers first. `COMMIT` is what a tree without its history is a copy of (empty: not known).

Standard library only, and nothing of the tree that this file lies in.
"""

from __future__ import annotations

import os
import runpy
import sys
import tomllib
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

PACKAGE = "jfabench"


def package_folders(tree: Path) -> dict[str, Path]:
    """The folder of each package of the tree, by import name. Raises `ValueError` where it is no tree of jfabench."""
    try:
        settings = tomllib.loads((tree / "pyproject.toml").read_text(encoding="utf-8"))
        named = settings["project"]["name"]
        setuptools = settings["tool"]["setuptools"]
        packages, mapped = setuptools["packages"], setuptools["package-dir"]
    except (OSError, KeyError, ValueError) as error:
        raise ValueError(f"{tree}: no source tree of {PACKAGE} ({type(error).__name__}: {error})") from None
    if named != PACKAGE:
        raise ValueError(f"{tree}: the source tree of {named}, not of {PACKAGE}")

    def folder(name: str) -> Path:
        if name in mapped:
            return tree / str(mapped[name])
        parent, _, last = name.rpartition(".")
        return (folder(parent) if parent else tree) / last

    return {name: folder(name) for name in packages}


class TreeFinder(MetaPathFinder):
    """Finds the packages of one tree; their modules are then looked up beside them as usual."""

    def __init__(self, folders: dict[str, Path]) -> None:
        self._folders = folders

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        folder = self._folders.get(fullname)
        if folder is None:
            return None
        return spec_from_file_location(fullname, folder / "__init__.py", submodule_search_locations=[str(folder)])


def main(argv: Sequence[str]) -> None:
    tree, commit, module, *rest = argv
    if commit:
        os.environ["JFABENCH_COMMIT"] = commit  # `jfabench.env` looks there
    sys.meta_path.insert(0, TreeFinder(package_folders(Path(tree))))
    sys.argv = [module, *rest]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
