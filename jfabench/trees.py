"""Source trees to measure from: a folder of sources as it lies, or a git revision of this repository, unpacked."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from jfabench import from_tree


class TreeError(ValueError):
    """A name that is no tree and no revision; the message says what it could be."""


@dataclass(frozen=True)
class Tree:
    """The sources below `root`, shown as `label`. `commit` is empty where the tree's own checkout tells, or nothing."""

    label: str
    root: Path
    commit: str = ""

    def command(self, module: str) -> tuple[str, ...]:
        """Runs a module of this tree in the present environment; arguments may follow."""
        return (sys.executable, "-P", str(Path(from_tree.__file__)), str(self.root), self.commit, module)


def is_tree(path: Path) -> bool:
    try:
        from_tree.package_folders(path)
    except ValueError:
        return False
    return True


def here() -> str:
    """The present folder if it holds sources, else the folder that jfabench is imported from if that does."""
    imported = Path(__file__).resolve().parent.parent
    return str(imported) if is_tree(imported) and not is_tree(Path()) else "."


def find(name: str, into: Path) -> Tree:
    """The tree that `name` means: a folder of sources, or a revision, which is unpacked below `into`.

    Revisions are those of the repository that the present folder lies in, or else of the one that jfabench is imported
    from. Nothing of the repository is changed. Raises `TreeError`.
    """
    path = Path(name)
    if path.is_dir() and is_tree(path):
        return Tree(name if name != "." else path.resolve().name, path.resolve())
    repository = _repository()
    if repository is None:
        raise TreeError(f"{name}: no source tree, and there is no git repository of jfabench here to look it up in")
    commit = _git(repository, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
    if commit is None:
        raise TreeError(
            f"{name}: no result folder (records.jsonl), no source tree (pyproject.toml of jfabench), and no "
            f"revision of {repository}; in a shallow clone, `git fetch --unshallow` brings older ones"
        )
    sha = commit.decode().strip()
    root = into / sha
    if not root.exists():
        _unpack(repository, sha, root)
    if not is_tree(root):
        raise TreeError(f"{name}: {sha[:12]} has no sources that could be measured (pyproject.toml with packages)")
    return Tree(f"{name} ({sha[:12]})" if not sha.startswith(name) else sha[:12], root, sha)


def _unpack(repository: Path, sha: str, root: Path) -> None:
    archive = _git(repository, "archive", "--format=tar", sha)
    if archive is None:
        raise TreeError(f"git cannot unpack {sha} of {repository}")
    part = root.with_name(f"{sha}.part")
    part.mkdir(parents=True, exist_ok=True)
    # An archive of nothing is damaged in the eyes of tarfile; that it has no sources is found by whoever looks.
    with suppress(tarfile.ReadError), tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(part, filter="data")
    part.rename(root)


def _repository() -> Path | None:
    for start in (Path.cwd(), Path(__file__).parent):
        top = _git(start, "rev-parse", "--show-toplevel")
        if top is not None and is_tree(path := Path(top.decode().strip())):
            return path
    return None


def _git(folder: Path, *arguments: str) -> bytes | None:
    """What git prints, None if it fails or is not there."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, check=False, timeout=120)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
