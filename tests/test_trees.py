"""Source trees: running one that is not the installed one, and revisions of a repository."""

from __future__ import annotations

import subprocess
from pathlib import Path

import fake_tree
import pytest

import jfabench
from jfabench import from_tree, trees

ROOT = Path(jfabench.__file__).resolve().parent.parent


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=n", "-c", "user.email=e", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two commits, tagged `old` and `new`; the present folder is the repository."""
    root = fake_tree.make(tmp_path / "repository")
    git(root, "init", "-q")
    for tag in ("old", "new"):
        (root / "kernels" / "which.py").write_text(f"print({tag!r})\n")
        git(root, "add", "-A")
        git(root, "commit", "-qm", tag)
        git(root, "tag", tag)
    monkeypatch.chdir(root)
    return root


def run(tree: trees.Tree, module: str) -> str:
    return subprocess.run(tree.command(module), check=True, capture_output=True, text=True, cwd="/").stdout.strip()


def test_the_packages_of_this_tree() -> None:
    folders = from_tree.package_folders(ROOT)
    assert folders["jfabench"] == ROOT / "jfabench"
    assert folders["jfabench.kernels.attention"] == ROOT / "kernels" / "attention"
    assert folders["jfabench.operators.providers"] == ROOT / "operators" / "providers"
    assert all((folder / "__init__.py").is_file() for folder in folders.values())


def test_a_module_of_another_tree_runs_in_place_of_the_installed_one(tmp_path: Path) -> None:
    root = fake_tree.make(tmp_path / "tree")
    show = "import jfabench, os\nprint(jfabench.__file__, __file__, os.environ.get('JFABENCH_COMMIT'))"
    (root / "kernels" / "where.py").write_text(show)
    package, module, commit = run(trees.Tree("x", root, "abc"), "jfabench.kernels.where").split()
    assert Path(package) == root / "jfabench" / "__init__.py"
    assert Path(module) == root / "kernels" / "where.py"
    assert commit == "abc"


def test_revisions_are_unpacked_side_by_side(repository: Path, tmp_path: Path) -> None:
    found = {name: trees.find(name, tmp_path) for name in ("old", "new", "HEAD~1")}
    assert run(found["old"], "jfabench.kernels.which") == run(found["HEAD~1"], "jfabench.kernels.which") == "old"
    assert run(found["new"], "jfabench.kernels.which") == "new"
    assert found["old"].commit == git(repository, "rev-parse", "old")
    assert found["old"].commit[:12] in found["old"].label
    assert git(repository, "status", "--porcelain") == ""
    assert len(git(repository, "worktree", "list").splitlines()) == 1  # nothing is left in the repository


def test_a_folder_of_sources_is_measured_as_it_lies(repository: Path, tmp_path: Path) -> None:
    (repository / "kernels" / "which.py").write_text("print('edited')\n")
    assert run(trees.find(".", tmp_path), "jfabench.kernels.which") == "edited"
    assert trees.find(str(repository), tmp_path).commit == ""


@pytest.mark.parametrize("name", ["no-such-revision", "--help", "old:kernels", "nowhere/at/all"])
def test_what_is_neither_says_so(repository: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(trees.TreeError, match="no revision of"):
        trees.find(name, tmp_path)


def test_a_revision_without_our_sources_is_refused(repository: Path, tmp_path: Path) -> None:
    git(repository, "checkout", "-q", "--orphan", "empty")
    git(repository, "rm", "-rqf", ".")
    git(repository, "commit", "-qm", "empty", "--allow-empty")
    git(repository, "tag", "void")
    git(repository, "checkout", "-q", "new")
    with pytest.raises(trees.TreeError, match="no sources that could be measured"):
        trees.find("void", tmp_path)


@pytest.mark.parametrize(
    "text", ["", "[project]\nname = 'other'\n[tool.setuptools]\npackages = []\npackage-dir = {}\n", "["]
)
def test_other_folders_are_no_trees(tmp_path: Path, text: str) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    assert not trees.is_tree(tmp_path)
    with pytest.raises(ValueError, match="source tree of"):
        from_tree.package_folders(tmp_path)
