"""What is to be simulated, found by its name, and what is wrong with it: in one line, with the place in its source."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

_START = Path.cwd()
"""The folder that places are shown relative to. Targets are loaded later, and may go elsewhere."""


class TargetError(Exception):
    """What cannot be simulated, and why: it cannot be loaded, launches nothing, has no configuration of the number
    that is wanted, or returns no verdict."""


class RaisedError(Exception):
    """What a target raised that is no verdict on its results, and at which of its lines."""


def function(target: str) -> Callable[[], object]:
    """The function without arguments that `target` names. Raises :class:`TargetError`."""
    found = find(target)
    if is_kernel(found):
        raise TargetError(f"{target} is a kernel: name a function without arguments that launches it")
    if not callable(found):
        raise TargetError(f"{target} is of type {type(found).__name__}: expected a function without arguments")
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        raise TargetError(f"{defined(found)} cannot be called without arguments: {error}") from error
    except ValueError:
        pass  # it is built in, and does not say what it takes
    return found  # type: ignore[no-any-return]


def find(target: str) -> Any:
    """What ``module:name`` or ``file.py:name`` names. Raises :class:`TargetError` with the line of a mistake."""
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise TargetError(f"{target}: expected module:function, or file.py:function")
    try:
        module = _of_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
        if not hasattr(module, name):
            raise TargetError(f"{place} has no function {name}")
        return getattr(module, name)
    except (TargetError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise TargetError(f"{place} cannot be imported: {told(error)}{_meant(place, error)}") from error


def _meant(place: str, error: BaseException) -> str:
    """A module that there is only within this package: where our kernels are targets, their names may leave it out."""
    top = place.partition(".")[0]
    if isinstance(error, ModuleNotFoundError) and error.name == top and importlib.util.find_spec(f"jfabench.{top}"):
        return f" (did you mean jfabench.{place}?)"
    return ""


def anchored(target: str) -> str:
    """`target`, but so that it means the same file when what is loaded before it has changed the folder."""
    place, colon, name = target.rpartition(":")
    return f"{Path(place).absolute()}{colon}{name}" if place.endswith(".py") else target


def is_kernel(found: Any) -> bool:
    """Whether it is a ``@triton.jit`` function, autotuned or not."""
    return hasattr(found, "fn")


def _of_file(path: Path) -> ModuleType:
    """The module in a file; if it is loaded already, that one, so that a test and its kernel are of the same."""
    for name in (path.stem, _private_name(path)):
        known = sys.modules.get(name)
        if known is not None and _is_same_file(getattr(known, "__file__", None), path):
            return known
    spec = importlib.util.spec_from_file_location(_private_name(path) if _is_taken(path) else path.stem, path)
    if spec is None or spec.loader is None or not path.exists():
        raise TargetError(f"{path}: there is no such file")
    module = importlib.util.module_from_spec(spec)
    folder = str(path.resolve().parent)
    if folder not in sys.path:  # as for a script: what lies beside it can be imported
        sys.path.append(folder)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(spec.name, None)  # it may have gone by its own doing
        raise
    return module


def _is_taken(path: Path) -> bool:
    """Whether another module has the file's name, loaded or to be imported: what imports that must not get the file."""
    if path.stem in sys.modules or path.stem in sys.stdlib_module_names:
        return True
    other = importlib.machinery.PathFinder.find_spec(path.stem)
    return other is not None and not _is_same_file(other.origin, path)


def _private_name(path: Path) -> str:
    """A name for the module in a file that no other module has."""
    return f"_{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]}"


def _is_same_file(known: str | None, path: Path) -> bool:
    return known is not None and Path(known).resolve() == path.resolve()


# Mistakes ------------------------------------------------------------------------------------------------------------


def telling(call: Callable[[], object]) -> Callable[[], object]:
    """``call``, but what it raises beside a verdict becomes a :class:`RaisedError`."""

    @functools.wraps(call)
    def run() -> object:
        try:
            return call()
        except (AssertionError, TargetError, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise RaisedError(told(error)) from error

    return run


def told(error: BaseException) -> str:
    """``file:line: type: message`` of a mistake in people's own code, on one line; without a place if it has none.

    What goes wrong while a kernel's code is carried out has told its lines already.
    """
    from .runtime import KernelError

    if isinstance(error, KernelError) and error.__cause__ is not None:
        return str(error)
    message = message_of(error)
    where = _line_of_syntax(error) if isinstance(error, SyntaxError) else ""
    where = where or _line_of(error.__traceback__)
    return ": ".join(filter(None, (where, type(error).__name__, " ".join(message.split()))))


def message_of(error: BaseException) -> str:
    """What an exception says; of one whose `__str__` raises, just that."""
    try:
        return str(error.msg) if isinstance(error, SyntaxError) and error.msg else str(error)
    except KeyboardInterrupt:
        raise
    except BaseException as another:
        return f"(its __str__ raises {type(another).__name__})"


def defined(call: Callable[..., object]) -> str:
    """A function's place and name; only its name if it is not written in Python."""
    call = inspect.unwrap(call)
    name = str(getattr(call, "__name__", call))
    code = getattr(call, "__code__", None)
    return f"{_shown(code.co_filename)}:{code.co_firstlineno}: {name}" if code else name


def _line_of_syntax(error: SyntaxError) -> str:
    file: object = error.filename  # people may raise one with anything
    return f"{_shown(file)}:{error.lineno}" if isinstance(file, str) and file and error.lineno else ""


def _line_of(raised: TracebackType | None) -> str:
    """The innermost line that is neither of a library nor of the simulator; empty if there is none."""
    for frame, line in reversed(list(traceback.walk_tb(raised))):
        file = frame.f_code.co_filename
        if not file.startswith("<") and not any(Path(file).is_relative_to(folder) for folder in _libraries()):
            return f"{_shown(file)}:{line}"
    return ""


@functools.cache
def _libraries() -> tuple[Path, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    return (Path(__file__).parent, *(Path(sysconfig.get_path(name)) for name in names))


def _shown(file: str) -> str:
    """Relative to the folder at the start, if it is below."""
    return os.path.relpath(file, _START) if Path(file).is_relative_to(_START) else file
