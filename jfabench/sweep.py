"""Sweep files: YAML -> a validated `SweepConfig` -> the list of `Case`s to measure.

A grid is a product of `axes`, each a dotted parameter name with its values, over fixed `params`. `overrides` change
parameters at points of the grid (a smaller batch for the longest sequences). `cpu` declares the small scale that runs
on a machine without a GPU.
"""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from jfabench.operator import Operator, load_operator, load_providers
from jfabench.policy import MeasurePolicy
from jfabench.records import Case, Direction

Scale = Literal["full", "cpu"]
WorkerMode = Literal["per_shape", "shared"]
KeyPath = tuple[str | int, ...]


_MOST_NODES = 100_000
_MOST_POINTS = 100_000


class ConfigError(ValueError):
    """A sweep file or a `--set` that cannot be used. The message names the file, the key and what would be valid."""


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Override(_Strict):
    """`set` replaces parameters wherever the parameters named in `when` have the given value (or one of a list)."""

    when: dict[str, Any] = Field(min_length=1)
    set: dict[str, Any] = Field(min_length=1)


class CpuScale(_Strict):
    """What a machine without a GPU runs instead. Parameters and axes named here replace those of the full scale."""

    params: dict[str, Any] = {}
    axes: dict[str, list[Any]] = {}
    overrides: list[Override] = []
    providers: list[str] | None = None
    directions: list[Direction] | None = None
    baseline: str | None = None
    measure: dict[str, Any] = {}


class SweepConfig(_Strict):
    operator: str
    description: str = ""
    baseline: str | None = None
    providers: list[str] = Field(min_length=1)
    directions: list[Direction] = Field(["fwd", "bwd"], min_length=1)
    seed: int = Field(0, ge=0, lt=2**31)
    params: dict[str, Any] = {}
    axes: dict[str, list[Any]] = {}
    overrides: list[Override] = []
    measure: MeasurePolicy = MeasurePolicy()  # type: ignore[call-arg]
    workers: WorkerMode = Field(
        "per_shape",
        description="per_shape: a process for each shape; shared: one process goes on until anything fails in it",
    )
    cpu: CpuScale | None = None


@dataclass(frozen=True)
class Sweep:
    """A sweep ready to run: its configuration at the chosen scale, and its cases in the order of measurement."""

    name: str
    path: Path
    scale: Scale
    config: SweepConfig
    cases: tuple[Case, ...]


def shipped() -> list[str]:
    """The names of the sweep files that come with jfabench."""
    return sorted(entry.name for entry in resources.files("jfabench.sweeps").iterdir() if entry.name.endswith(".yaml"))


def find_config(name: str) -> Path:
    """The path of a sweep file: `name` as a path, else as the name of a shipped one (`jagged` or `jagged.yaml`)."""
    path = Path(name)
    if path.is_file():
        return path
    known = shipped()
    for candidate in (name, f"{name}.yaml"):
        if candidate in known:
            return Path(str(resources.files("jfabench.sweeps").joinpath(candidate)))
    hint = _nearest(name, [*known, *(Path(k).stem for k in known)])
    raise ConfigError(f"no sweep file {name!r}, as a path or in sweeps/{hint}; shipped: {', '.join(known)}")


def load_sweep(
    name: str,
    scale: Scale = "full",
    *,
    settings: Sequence[str] = (),
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    directions: Sequence[Direction] = (),
) -> Sweep:
    """Reads, validates and expands a sweep file.

    Args:
        name: a path, or the name of a shipped file.
        scale: `full`, or `cpu` for the scale that the file declares for machines without a GPU.
        settings: `key=value` overrides. A key is a field of the file (`measure.target`, `seed`) or a parameter
            (`batch`, `lengths.fill`); for an axis, the value (or list of values) replaces the axis.
        only, skip: names of providers to keep or to leave out.
        directions: directions to run instead of the file's.

    Raises:
        ConfigError: the file, a setting or a provider name is not valid.
    """
    path = find_config(name)
    source = _Source(path)
    config = source.validate(source.data)
    if scale == "cpu":
        config = _at_cpu_scale(source, config)
    if settings:
        config = _with_settings(source, config, settings)
    if directions:
        config = config.model_copy(update={"directions": list(dict.fromkeys(directions))})
    config = _with_providers(source, config, only, skip)
    return Sweep(path.stem, path, scale, config, tuple(_expand(source, config)))


# Validation ----------------------------------------------------------------------------------------------------------


class _Source:
    """A sweep file's data, and where each key stands in it, for error messages."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: cannot be read: {error}") from None
        self.lines: dict[str, int] = {}  # by dotted key: an axis `a.b` stands in the file as one key
        self._nodes = 0
        try:
            self._index(yaml.compose(text, Loader=yaml.SafeLoader), ())
            data = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, OverflowError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{path}: not valid YAML: {_one_line(error)}") from None
        except RecursionError:
            raise ConfigError(f"{path}: not valid as a sweep file: nested too deeply, or in itself") from None
        if not isinstance(data, dict):
            raise ConfigError(
                f"{path}: expected a mapping with at least `operator` and `providers`, found {_kind(data)}"
            )
        self.data: dict[str, Any] = data

    def _index(self, node: Any, path: KeyPath) -> None:
        self._nodes += 1
        if self._nodes > _MOST_NODES:
            raise ConfigError(f"{self.path}: more than {_MOST_NODES:,} values; a sweep file is a page or two")
        if isinstance(node, yaml.MappingNode):
            first: dict[str, int] = {}
            for key, value in node.value:
                here, line = (*path, str(key.value)), key.start_mark.line + 1
                if key.value in first:
                    raise ConfigError(
                        f"{self.path}:{line}: key `{_dotted(here)}` occurs twice (first on line {first[key.value]})"
                    )
                first[key.value] = self.lines[_dotted(here)] = line
                self._index(value, here)
        elif isinstance(node, yaml.SequenceNode):
            for number, value in enumerate(node.value):
                self.lines[_dotted((*path, number))] = value.start_mark.line + 1
                self._index(value, (*path, number))

    def error(self, key: KeyPath, message: str) -> ConfigError:
        """An error at `key`, or at the nearest enclosing key that stands in the file."""
        for length in range(len(key), -1, -1):
            line = self.lines.get(_dotted(key[:length]))
            if line is not None:
                return ConfigError(f"{self.path}:{line}: `{_dotted(key)}`: {message}")
        where = f"`{_dotted(key)}`: " if key else ""
        return ConfigError(f"{self.path}: {where}{message}")

    def validate(self, data: Mapping[str, Any]) -> SweepConfig:
        try:
            return SweepConfig.model_validate(data)
        except ValidationError as error:
            raise self.first_error(error, SweepConfig, ()) from None

    def first_error(self, error: ValidationError, model: type[BaseModel], prefix: KeyPath) -> ConfigError:
        # An unknown key first: it is often the cause of a "missing" one.
        details = sorted(error.errors(), key=lambda detail: detail["type"] != "extra_forbidden")
        detail = details[0]
        loc = _without_union_tags(model, detail["loc"])
        key = (*prefix, *loc)
        if detail["type"] == "extra_forbidden":
            valid = _fields_at(model, detail["loc"][:-1])
            return self.error(key, f"unknown key{_nearest(str(loc[-1]), valid)}; valid: {', '.join(valid)}")
        if detail["type"] == "missing":
            return self.error(key, "required, but missing")
        message = detail["msg"].removeprefix("Value error, ")
        given = detail.get("input")
        shown = f" (given: {given!r})" if isinstance(given, str | int | float | bool | type(None)) else ""
        near = ""
        if isinstance(given, str) and detail["type"] in ("literal_error", "union_tag_invalid"):
            near = _nearest(given, _expected_values(detail))
        return self.error(key, f"{message}{shown}{near}")


def _with_providers(source: _Source, config: SweepConfig, only: Sequence[str], skip: Sequence[str]) -> SweepConfig:
    operator = _operator(source, config)
    providers = load_providers(operator.name)
    known = sorted(providers.by_name)
    for number, name in enumerate(config.providers):
        if name not in known:
            broken = "".join(f"; {plugin.name} could not be loaded ({plugin.why})" for plugin in providers.broken)
            raise source.error(
                ("providers", number),
                f"{_unknown_provider(name, known)}{broken}",
            )
    for option, names in (("--only", only), ("--skip", skip)):
        for name in names:
            if name not in known:
                raise ConfigError(f"{option}: {_unknown_provider(name, known)}")
    # --only may name a provider that the file does not list: it is the natural way to try one more.
    chosen = list(dict.fromkeys(only)) if only else list(dict.fromkeys(config.providers))
    chosen = [name for name in chosen if name not in skip]
    if not chosen:
        raise ConfigError(f"no provider is left after --only and --skip; the file has {', '.join(config.providers)}")
    if config.baseline is not None and config.baseline not in known:
        raise source.error(
            ("baseline",),
            f"unknown provider {config.baseline!r}{_nearest(config.baseline, known)}; known: {', '.join(known)}",
        )
    return config.model_copy(update={"providers": chosen})


def _operator(source: _Source, config: SweepConfig) -> Operator:
    try:
        return load_operator(config.operator)
    except KeyError as error:
        raise source.error(("operator",), str(error.args[0])) from None


# Scale and settings --------------------------------------------------------------------------------------------------


def _at_cpu_scale(source: _Source, config: SweepConfig) -> SweepConfig:
    cpu = config.cpu
    if cpu is None:
        raise ConfigError(
            f"{source.path}: declares no `cpu:` scale, so it needs a GPU; add a `cpu:` section with small "
            "`params`/`axes` and CPU providers, or run it on a machine with a GPU"
        )
    try:
        measure = MeasurePolicy.model_validate({**config.measure.model_dump(), "mode": None, **cpu.measure})
    except ValidationError as error:
        raise source.first_error(error, MeasurePolicy, ("cpu", "measure")) from None
    params = _merged(config.params, cpu.params)
    axes = {**config.axes, **cpu.axes}
    for key in cpu.params:
        axes.pop(key, None)
    return config.model_copy(
        update={
            "params": params,
            "axes": axes,
            "overrides": cpu.overrides,
            "providers": cpu.providers or config.providers,
            "directions": cpu.directions or config.directions,
            "baseline": cpu.baseline or config.baseline,
            "measure": measure,
        }
    )


def _with_settings(source: _Source, config: SweepConfig, settings: Sequence[str]) -> SweepConfig:
    data = config.model_dump()
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key:
            raise ConfigError(
                f"--set {setting}: expected key=value, such as --set batch=16 or --set measure.target=0.02"
            )
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"--set {setting}: the value is not valid YAML: {_one_line(error)}") from None
        head = key.split(".")[0]
        for override in data["overrides"]:  # the command line has the last word
            override["set"] = {k: v for k, v in override["set"].items() if k != key.removeprefix("params.")}
        data["overrides"] = [override for override in data["overrides"] if override["set"]]
        if key in data["axes"]:
            data["axes"][key] = value if isinstance(value, list) else [value]
        elif key.startswith("axes."):
            data["axes"][key.removeprefix("axes.")] = value if isinstance(value, list) else [value]
        elif head in SweepConfig.model_fields and head != "cpu":
            _put(data, key, value)
        elif head in _operator(source, config).model.model_fields:
            for axis in data["axes"]:
                if axis.startswith(f"{key}.") or key.startswith(f"{axis}."):
                    raise ConfigError(f"--set {setting}: conflicts with the axis `{axis}`; set axes.{axis} instead")
            _put(data["params"], key, value)
        else:
            keys = [*SweepConfig.model_fields, *_operator(source, config).model.model_fields, *data["axes"]]
            valid = list(dict.fromkeys(keys))  # an axis may be a whole parameter
            raise ConfigError(f"--set {setting}: unknown key {key!r}{_nearest(key, valid)}; valid: {', '.join(valid)}")
    try:
        return SweepConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"--set: {source.first_error(error, SweepConfig, ())}") from None


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in changes.items():
        _put(result, key, value)
    return result


def _put(target: dict[str, Any], dotted: str, value: Any) -> None:
    """Sets `target["a"]["b"]` for the dotted name `a.b`, without changing any mapping that `target` shares."""
    head, _, rest = dotted.partition(".")
    if rest:
        inner = target.get(head)
        child = dict(inner) if isinstance(inner, Mapping) else {}
        _put(child, rest, value)
        target[head] = child
    else:
        target[head] = value


def lookup(params: Mapping[str, Any], dotted: str) -> Any:
    """The value of a dotted parameter name, or None where there is none."""
    value: Any = params
    for part in dotted.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


# Expansion -----------------------------------------------------------------------------------------------------------


def _expand(source: _Source, config: SweepConfig) -> Iterable[Case]:
    operator = _operator(source, config)
    for axis, values in config.axes.items():
        if not values:
            raise source.error(("axes", axis), "an axis needs at least one value")
        for other in config.axes:
            if other.startswith(f"{axis}."):
                raise source.error(("axes", other), f"conflicts with the axis `{axis}`, which replaces all of it")
    if (points := math.prod(map(len, config.axes.values()))) > _MOST_POINTS:
        raise source.error(("axes",), f"the grid has {points:,} points; at most {_MOST_POINTS:,} are possible")
    for number, override in enumerate(config.overrides):
        for part in ("when", "set"):
            for key in getattr(override, part):
                _require_parameter(source, operator, ("overrides", number, part, key), key)
    seen: set[str] = set()
    for chosen in itertools.product(*config.axes.values()):
        point = dict(zip(config.axes, chosen, strict=True))
        params = _merged(_merged({}, config.params), point)
        try:
            for override in config.overrides:
                complete = operator.dump(operator.parse(_relative_to(source.path, params)))
                if all(_matches(lookup(complete, key), wanted) for key, wanted in override.when.items()):
                    params = _merged(params, override.set)
            valid = operator.dump(operator.parse(_relative_to(source.path, params)))
        except ValidationError as error:
            raise _point_error(source, config, operator, error, point) from None
        except OverflowError as error:
            raise source.error(("params",), f"a number is too large ({error})") from None
        _require_drawable(source, operator, valid, config.seed, point)
        for direction in config.directions:
            for provider in config.providers:
                case = Case(operator.name, provider, direction, valid, config.seed)
                if case.key not in seen:  # an override can make two points of a grid equal
                    seen.add(case.key)
                    yield case


def _require_parameter(source: _Source, operator: Operator, where: KeyPath, dotted: str) -> None:
    """Raises `ConfigError` where `dotted` names no parameter of the operator in any of its variants."""
    parts = dotted.split(".")
    for length, part in enumerate(parts):
        valid = _fields_at(operator.model, parts[:length])
        if part not in valid:
            near = _nearest(part, valid)
            raise source.error(where, f"unknown parameter {dotted!r}{near}; valid: {', '.join(valid) or 'none'}")


def _require_drawable(
    source: _Source, operator: Operator, params: Mapping[str, Any], seed: int, point: Mapping[str, Any]
) -> None:
    """Raises `ConfigError` where the inputs of a point cannot exist: more rows, say, than offsets can count."""
    try:
        operator.facts(operator.parse(params), seed)
    except (ValueError, OverflowError, MemoryError) as error:
        at = ", ".join(f"{axis}={value}" for axis, value in point.items())
        raise ConfigError(f"{source.path}: impossible inputs{f' at {at}' if at else ''}: {error}") from None


def _matches(value: Any, wanted: Any) -> bool:
    return value in wanted if isinstance(wanted, list) else bool(value == wanted)


def _relative_to(config: Path, params: dict[str, Any]) -> dict[str, Any]:
    """A file of lengths is looked up beside the sweep file that names it, then in the present folder."""
    for key in ("lengths", "q_lengths"):
        spec = params.get(key)
        if isinstance(spec, Mapping) and isinstance(spec.get("path"), str):
            beside = config.parent / spec["path"]
            path = (beside if beside.exists() else Path(spec["path"])).resolve()
            # The path is part of the case: one way to write it, however the sweep file was named on the command line.
            shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
            params = {**params, key: {**spec, "path": str(shown)}}
    return params


def _point_error(
    source: _Source, config: SweepConfig, operator: Operator, error: ValidationError, point: Mapping[str, Any]
) -> ConfigError:
    """Places an error of the operator's parameters at the axis or the parameter that holds the value."""
    details = sorted(error.errors(), key=lambda detail: detail["type"] != "extra_forbidden")
    loc = _without_union_tags(operator.model, details[0]["loc"])
    dotted = _dotted(loc)
    prefix: KeyPath = ("params",)
    if any(dotted == axis or dotted.startswith(f"{axis}.") for axis in config.axes):
        prefix = ("axes",)
    at = ", ".join(f"{axis}={value}" for axis, value in point.items())
    base = source.first_error(error, operator.model, prefix)
    return ConfigError(f"{base} (at {at})" if at and prefix == ("axes",) else str(base))


# Words for errors ----------------------------------------------------------------------------------------------------


def _nearest(name: str, valid: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(dict.fromkeys(valid)), n=1, cutoff=0.5)
    return f" (did you mean `{close[0]}`?)" if close else ""


def _unknown_provider(name: str, known: Sequence[str]) -> str:
    return f"unknown provider {name!r}{_nearest(name, known)}; known: {', '.join(known)}"


def _expected_values(detail: Any) -> list[str]:
    context = detail.get("ctx", {})
    text = str(context.get("expected") or context.get("expected_tags") or "")
    return [part.strip(" '\"") for part in text.replace(" or ", ",").split(",")]


def _dotted(key: Sequence[str | int]) -> str:
    return ".".join(str(part) for part in key)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"


def _schema_at(model: type[BaseModel], loc: Sequence[str | int]) -> tuple[list[dict[str, Any]], KeyPath]:
    """Follows a pydantic error location through the model's JSON schema.

    Returns the schemas that the location can mean, and the location without the tags that pydantic puts in for
    members of a union.
    """
    root = model.model_json_schema()
    current = _alternatives(root, root)
    plain: list[str | int] = []
    for part in loc:
        tagged = [s for s in current if any(p.get("const") == part for p in s.get("properties", {}).values())]
        if tagged and len(current) > 1:
            current = tagged
            continue
        following = [s["properties"][part] for s in current if part in s.get("properties", {})]
        following += [s["items"] for s in current if isinstance(part, int) and isinstance(s.get("items"), dict)]
        current = [option for schema in following for option in _alternatives(root, schema)]
        plain.append(part)
    return current, tuple(plain)


def _alternatives(root: dict[str, Any], schema: dict[str, Any]) -> list[dict[str, Any]]:
    if "$ref" in schema:
        return _alternatives(root, root["$defs"][schema["$ref"].rsplit("/", 1)[-1]])
    options = schema.get("anyOf") or schema.get("oneOf")
    if options:
        return [found for option in options for found in _alternatives(root, option)]
    return [schema]


def _fields_at(model: type[BaseModel], loc: Sequence[str | int]) -> list[str]:
    schemas, _ = _schema_at(model, loc)
    return list(dict.fromkeys(name for schema in schemas for name in schema.get("properties", {})))


def _without_union_tags(model: type[BaseModel], loc: Sequence[str | int]) -> KeyPath:
    return _schema_at(model, loc)[1]
