"""The backends that there are: a folder of this room each, or a package with an entry point of `onnxq.backends`."""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from onnxq.errors import ConfigError, Location, suggest_names
from onnxq.sites import Names, Settings, drop_repeats
from onnxq.spec import FLOAT8

if TYPE_CHECKING:
    from onnxq.backends.base import IntegerSums, OperatorTable, Target
    from onnxq.backends.costs import MachineCosts
    from onnxq.backends.engine import Engine
    from onnxq.config import Config
    from onnxq.config.rules import RuleSet

# Entry points of packages that add a backend: its name, and where the Backend stands.
GROUP = "onnxq.backends"
# Quantizes nothing; only float types are chosen.
_FLOAT = "float"
_WEIGHT = re.compile(r"0*[1-9]\d{0,5}(\.\d+)?|0?\.\d*[1-9]\d*")


@dataclass(frozen=True, kw_only=True)
class Backend:
    """All that is known of one engine. Costs, exclusions, float types and 16-bit sums are fields of its targets.

    title: its name for people. modes: by mode of quantization, what it accepts; mode `float` follows from them.
    engines: its libraries, the one that `prove` takes first. sums: of its kernels that add in 16 bits. limits,
    rule_limits: of the configuration, checked when it is read. aliases: names that other tools have for it. reference:
    its engine is ONNX Runtime, which `onnxq.runtime` runs. formats: beginnings of the names of the
    formats of `import-calibration` that are files of this engine. plugin_advice: a remedy for people, where ONNX
    Runtime does not have an operator; "" for none. tables: of devices that its users may run files on, which leave some
    operators to the CPU.
    """

    name: str
    title: str = ""
    modes: Mapping[str, Target]
    engines: tuple[Engine, ...] = ()
    sums: IntegerSums | None = None
    limits: tuple[Limit, ...] = ()
    rule_limits: tuple[RuleLimit, ...] = ()
    aliases: Names = ()
    reference: bool = False
    formats: Names = ()
    plugin_advice: str = ""
    tables: tuple[OperatorTable, ...] = ()

    @property
    def usual(self) -> Target:
        """The target of what is the same in all modes."""
        return self.modes.get("static") or next(iter(self.modes.values()))

    @property
    def local(self) -> Engine | None:
        """The engine that runs on this machine: of those installed one that builds for its device; None without."""
        return min(self.engines, key=lambda e: (not e.installed, e.builds_ahead), default=None)


# By name, as far as they have been loaded. A program without a package adds its own here.
BACKENDS: dict[str, Backend] = {}


def _list_folders() -> dict[str, EntryPoint]:
    """Onnxq's own backends by name, as the entry points of pyproject.toml.

    By the folders, since a checkout may stand beside the metadata of another release.
    """
    modules = pkgutil.iter_modules([str(Path(__file__).parent)])
    names = (module.name for module in modules if module.ispkg)
    return {name: EntryPoint(name, f"onnxq.backends.{name}:BACKEND", GROUP) for name in names}


def list_names(*, foreign: bool = True) -> list[str]:
    """The names of onnxq's own backends and those that a program added; foreign: those of other packages, too."""
    others = entry_points(group=GROUP).names if foreign else ()
    return sorted({*BACKENDS, *_list_folders(), *others})


def list_runnable() -> list[str]:
    """The names of backends with engines, whose models `diff` can run.

    Onnxq's own have their engines in a module `engine`. They are not loaded for it: the help of commands lists these.
    """
    own = list_names(foreign=False)
    folder = Path(__file__).parent
    names = [
        name
        for name in own
        if (BACKENDS[name].engines if name in BACKENDS else (folder / name / "engine.py").exists())
    ]
    others = list_backends(foreign=True) if list_names() != own else ()
    names += [backend.name for backend in others if backend.engines and backend.name not in own]
    return names


def list_backends(*, foreign: bool = False) -> Iterator[Backend]:
    """Onnxq's own backends and those that a program added; foreign: then those of other packages that can be loaded."""
    for name in drop_repeats([*list_names(foreign=False), *list_names(foreign=foreign)]):
        try:
            backend = load_backend(name)
        except ConfigError:  # whoever names it is told
            continue
        if backend is not None:
            yield backend


def split_target(name: str) -> dict[str, float]:
    """The backends that a target names, "ort,openvino" or "ort=2,openvino=1", each with its weight; 0 for none stated.

    Raises ConfigError for a weight that is none.
    """
    weights = {}
    for word in name.split(","):
        backend, stated, weight = word.partition("=")
        if stated and not _WEIGHT.fullmatch(weight):
            fix = f"give a number above 0, e.g. `{backend}=2`"
            raise ConfigError(f"target {name!r}", f"{weight!r} is no weight", fix, code="Q325")
        weights[backend] = float(weight or 0)
    return weights


def list_parts(name: str) -> list[Backend]:
    """The backends of the engines that a target is for."""
    return [find_backend(part) for part in split_target(name)]


def load_backend(name: str) -> Backend | None:
    """The backend of this name, or of several; None where one is not there.

    Raises ConfigError for a package that cannot be loaded, and for engines that cannot share a file.
    """
    parts = split_target(name)
    if [*parts] != [name]:
        return _join_backends(name) if all(map(load_backend, parts)) else None
    if name not in BACKENDS:
        # Onnxq's own come first: no package can take the place of one.
        entry = _list_folders().get(name) or next(iter(entry_points(group=GROUP, name=name)), None)
        if entry is None:
            return None
        BACKENDS[name] = _load_entry(entry)
    return BACKENDS[name]


@cache
def _join_backends(name: str) -> Backend:
    """The backend of a target that names several. Raises ConfigError where no file can serve all of them."""
    from onnxq.backends.joined import explain_alone, join_targets, unite_entries

    weights = split_target(name)
    parts = list_parts(name)
    modes = {}
    for mode in parts[0].modes:
        targets = [part.modes[mode] for part in parts if mode in part.modes]
        target = join_targets(targets, weights) if len(targets) == len(parts) else None
        if target is not None:
            modes[mode] = target
    cause = "" if modes else "no mode of quantization serves all of them"
    for part in parts:
        if reason := explain_alone(part.usual):
            cause = f"{part.name} {reason}"
    if cause:
        files = ", ".join(f"`target={part!r}`" for part in weights)
        raise ConfigError(f"target {name!r}", cause, f"make a file for each: {files}", code="Q325")

    return Backend(
        name=name,
        title=" and ".join(part.title for part in parts),
        modes=modes,
        engines=unite_entries([part.engines for part in parts]),
        # A value must suit each of the engines, as the one file is for all.
        limits=(*unite_entries([part.limits for part in parts]), _ONE_ENGINE),
        rule_limits=unite_entries([part.rule_limits for part in parts]),
    )


def _load_entry(entry: EntryPoint) -> Backend:
    try:
        backend = entry.load()
        if not isinstance(backend, Backend):
            raise TypeError(f"{entry.attr} is a {type(backend).__name__}")
    # Whatever the code of another package raises.
    except Exception as error:
        cause = f"its package cannot be loaded from {entry.value}: {type(error).__name__}: {error}"
        fix = f"mend or remove the package; its entry point of {GROUP} must name a Backend"
        raise ConfigError(f"target {entry.name!r}", cause, fix, code="Q312") from error
    return backend


def find_backend(name: str) -> Backend:
    """The backend of this name. Raises ConfigError, with the nearest name, where there is none."""
    backend = load_backend(name)
    if backend is None:
        name = next(part for part in split_target(name) if load_backend(part) is None)
        fix = suggest_names(name, list_names())
        raise ConfigError(f"target {name!r}", "there is none of this name", fix, code="Q312")
    return backend


def find_modes(name: str) -> Mapping[str, Target]:
    """The targets of the backend of this name by mode; empty where there is none. Loads that of another package."""
    backend = load_backend(name)
    return {} if backend is None else backend.modes


def find_target(name: str, mode: str = "") -> Target:
    """The target of the backend of this name in a mode. Raises ConfigError, with the nearest name, where there is none.

    mode: "" for what is the same in all modes.
    """
    backend = find_backend(name)
    if mode not in ("", _FLOAT, *backend.modes):
        fix = suggest_names(mode, {_FLOAT, *backend.modes})
        raise ConfigError(f"target {name!r}", f"has no mode {mode!r}", fix, code="Q312")
    target = backend.modes.get(mode) or backend.usual
    if mode != _FLOAT:
        return target
    return replace(
        target,
        rules=(),
        capabilities=(),
        no_kernel={},
        no_gain={},
        costs={},
        # In a file without pairs no engine quantizes by itself, so that nothing is to be kept from it.
        quantizes_alone=False,
        misreads=(),
    )


def find_reference() -> Backend:
    """The backend of ONNX Runtime, which computes all references."""
    return next(backend for backend in list_backends() if backend.reference)


def find_ideal() -> Backend:
    """The backend that stands for no engine."""
    return next(backend for backend in list_backends() if backend.usual.ideal)


def find_holder(storage: str) -> Backend:
    """The first of onnxq's own backends that quantizes to a storage type, and is an engine."""
    return next(
        backend
        for backend in list_backends()
        if any(storage in row.storage for row in backend.usual.capabilities) and backend.engines
    )


def find_sums(engine: str = "") -> IntegerSums:
    """The 16-bit sums of an engine's kernels.

    engine: "" for ONNX Runtime's, which files of any origin are looked through for.
    """
    holders = list_backends(foreign=True) if engine else ()
    own = (backend.sums for backend in holders if engine in [each.name for each in backend.engines])
    sums = next(own, None) or find_reference().sums
    assert sums is not None
    return sums


def list_costs(target: Target, cpu: str) -> dict[str, MachineCosts]:
    """The costs of one kind of CPU, by each engine where there are several; of all for "any" and for unknown kinds.

    Where a target has none, those of ONNX Runtime stand for the work of its nodes.
    """
    from onnxq.backends.cpu_costs import CpuCosts

    tables = target.costs or find_reference().usual.costs
    alone = {name: table for name, table in tables.items() if name.split()[0] == cpu}
    # A file for any CPU may run on one with AMX.
    slow = {n: replace(t, slow_state=True) for n, t in tables.items() if isinstance(t, CpuCosts)}
    return alone or {**tables, **slow}


def list_engines(*, foreign: bool = True) -> dict[str, Engine]:
    """All engines by name; first those of a backend that builds on any machine."""
    backends = sorted(
        list_backends(foreign=foreign),
        key=lambda backend: not any(engine.builds_ahead for engine in backend.engines),
    )
    return {engine.name: engine for backend in backends for engine in backend.engines}


def find_engine(name: str) -> Engine:
    """The engine of this name. Raises ConfigError, with the nearest name, where there is none."""
    # Packages of others are loaded only where the name is none of onnxq's own.
    engine = list_engines(foreign=False).get(name) or list_engines().get(name)
    if engine is None:
        fix = suggest_names(name, list_engines())
        raise ConfigError(f"engine {name!r}", "is not known", fix, code="Q312")
    return engine


def find_compiler(target: str) -> Engine:
    """The engine of a backend that compiles models for its device. Raises ConfigError where there is none."""
    for engine in find_backend(target).engines:
        if engine.compiles:
            return engine
    compiled = (backend.name for backend in list_backends() for e in backend.engines if e.compiles)
    fix = f"leave it out, or take `target={next(compiled)!r}`"
    raise ConfigError("output.compiled", f"target {target} has no compiler", fix, code="Q317")


def find_usual_engine(*, integers: bool = False) -> Engine:
    """The engine that models without a plan are proved on, with integer operators or without: it builds anywhere."""
    usual = (engine for engine in list_engines(foreign=False).values() if engine.builds_ahead)
    return find_reference().engines[0] if integers else next(usual)


# Limits of a backend, checked when a configuration is read, because file and line are known then.
# The tables of targets decide node by node; here only values are refused that no node supports.

# Observers that need no evenly spaced values, and FP8 values are not evenly spaced.
_RANGE_ONLY = ("minmax", "moving_average", "percentile")


@dataclass(frozen=True)
class Limit:
    """The allowed values of one field."""

    # Dotted path.
    path: str
    takes: Callable[[Config], bool]
    # What the engine does with other values.
    why: str
    fix: str


_ONE_ENGINE = Limit(
    "placement",
    lambda c: c.placement == "rules",
    "placements are timed on one engine",
    "write `placement: rules`, or a target of one engine",
)


@dataclass(frozen=True)
class RuleLimit:
    """The allowed requests of a rule."""

    # Field of the request that does not fit; "" where all do.
    find: Callable[[RuleSet], str]
    why: str
    fix: str


OBSERVER = "weights.observer"
NO_CPU_KINDS = Limit(
    "cpu",
    lambda c: c.cpu == "any",
    "its placement does not go by the kind of CPU",
    "remove it, or write `target: ort`",
)
NO_OPERATORS = Limit(
    "emit",
    lambda c: c.emit == "qdq",
    "only ONNX Runtime has MatMulNBits and QLinear operators",
    "remove it, or write `target: ort`",
)


def is_static(config: Config) -> bool:
    """True where activations have scales that stand in the file."""
    return config.mode in ("static", "auto")


def is_dynamic(config: Config) -> bool:
    """True where activations have scales of each run."""
    return config.mode in ("dynamic", "auto")


def has_positive_scales(config: Config) -> bool:
    """True where no scale of a weight may be negative."""
    return not dict(config.weights.observer.options).get("signed_scales", False)


def _can_have_signed_scales(config: Config) -> bool:
    blocks = config.mode == "weight-only" and config.weights.granularity == "block"
    return blocks or has_positive_scales(config)


SIGNED_BLOCKS = Limit(
    OBSERVER,
    _can_have_signed_scales,
    "negative scales are for blocks in mode weight-only",
    "remove `signed_scales`",
)


def find_faults(
    config: Config, limits: tuple[Limit, ...], rule_limits: tuple[RuleLimit, ...]
) -> Iterator[tuple[str, str, str]]:
    """(path, cause, fix) of every value that the limits refuse, then of an observer that does not serve its type."""
    for limit in limits:
        if not limit.takes(config):
            yield limit.path, limit.why, limit.fix
    for k, rule in enumerate(config.rules):
        # The first rule that matches wins, so that nothing but the section stands below it.
        weights = config.weights.model_copy(update=rule.set.given())
        ruled = config.model_copy(update={"weights": weights})
        for limit in limits:
            if limit.path == OBSERVER and rule.set.observer is not None and not limit.takes(ruled):
                yield f"rules[{k}].set.observer", limit.why, limit.fix
        for rule_limit in rule_limits:
            if field := rule_limit.find(rule.set):
                yield f"rules[{k}].set.{field}", rule_limit.why, rule_limit.fix
    activations = config.activations
    if activations.storage == FLOAT8 and activations.observer.name not in _RANGE_ONLY:
        name = activations.observer.name
        cause = f"{name!r} weighs evenly spaced levels, and those of FP8 are not"
        yield "activations.observer", cause, f"use one of {', '.join(_RANGE_ONLY)}"


def load_config(
    source: str | Path | Config | None = None,
    overrides: Settings | None = None,
    *,
    target: str | None = None,
) -> Config:
    """Read a preset by name or a YAML file by path. None is the preset of the target; a Config is used as it is.

    overrides: values by dotted path ("data.samples") or nested; None means not given. target: of files that name none,
    by default `ort`. A file extends a preset or another file by `extends:`, or else the preset of its target; its own
    rules, libraries and plugins come before the inherited ones.
    Raises ConfigError for unknown keys and values, and for those that the target does not support, with file, line,
    dotted path and the nearest name.
    """
    # Here: a process that builds reads no configuration, and pydantic would be half of its start.
    from onnxq.config import read_config

    return check_limits(read_config(source, overrides, target=target))


def check_target(config: Config) -> None:
    """Raise ConfigError, with file and line, for a target or mode that is not registered."""
    try:
        find_target(config.target, config.mode)
    except ConfigError as error:
        raise _locate_target(config, error) from error


def _locate_target(config: Config, error: ConfigError) -> ConfigError:
    return ConfigError(
        config.where("target"), f"{config.target!r}: {error.cause}", error.fix, code=error.code
    )


def check_limits(config: Config) -> Config:
    """Return the configuration. Raises ConfigError with file, line and path of a value its target does not support,
    and of a name that no engine has.
    """
    try:
        backend = load_backend(config.target)
    except ConfigError as error:
        raise _locate_target(config, error) from error
    limits = ((), ()) if backend is None else (backend.limits, backend.rule_limits)
    for path, cause, fix in find_faults(config, *limits):
        raise ConfigError(_locate_field(config, path), cause, fix, code="Q307")
    for path in ("prove.engine", "bench.engine"):
        name = getattr(config, path.partition(".")[0]).engine
        if name is not None:
            _check_name(config, path, name, list_engines())
    for k, name in enumerate(config.diff.engines):
        _check_name(config, f"diff.engines[{k}]", name, list_runnable())
    return config


def list_registered(kind: str) -> dict[str, str]:
    """The values of an option, with the devices of engines.

    kind: "backends", "engines", or "runnable" for backends whose models `diff` can run.
    """
    if kind == "engines":
        return {name: engine.place for name, engine in list_engines().items()}
    return dict.fromkeys(list_runnable() if kind == "runnable" else list_names(), "")


def _check_name(config: Config, path: str, name: str, names: Collection[str]) -> None:
    if name not in names:
        cause = f"{name!r} is not one of {', '.join(names)}"
        fix = suggest_names(name, names)
        raise ConfigError(_locate_field(config, path), cause, fix, code="Q304")


def _locate_field(config: Config, path: str) -> Location:
    """`file:line: path` of the field. The line is that of its section, or of `target`, if the field was not written."""
    # A list may be written as one text, whose words have no places of their own.
    whole = path.partition("[")[0] if path.endswith("]") else path
    places = map(config.find_place, (path, whole, path.rpartition(".")[0], "target"))
    return next(filter(None, places), Location("")) / path
