"""`onnxq convert`: a quantized file of any tool, for another engine, with its own numbers."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from onnxq.backends import find_backend, load_config
from onnxq.config import Command, Config, ProveConfig, drop_unset, expand_names, list_presets
from onnxq.engines.prove.prove import ProveRequest, prove_model
from onnxq.errors import ConfigError, OnnxqError
from onnxq.graph import get_index, save_model
from onnxq.graph.light import is_large_model, measure_size
from onnxq.pipeline import Configuration, ModelSource, OutputPath, Overrides, name_file, open_run
from onnxq.pipeline.finalize import Result, write_result
from onnxq.pipeline.quantized_source import QuantizedSource, read_quantized
from onnxq.pipeline.retarget import Answers, Kept, MovedSites, retarget, warn_integers
from onnxq.plan import Plan
from onnxq.progress import Progress, silent
from onnxq.report import Report, ResultFormat, Text, terminal
from onnxq.sites import Settings
from onnxq.spec import PerBlock
from onnxq.wording import format_counts, show_as_summary

FLOAT = "float"


@dataclass(frozen=True, kw_only=True)
class KernelTypes:
    """The kernels of a file in an engine.

    types: operator -> type that its nodes compute in -> how many. count: in all. reason: why there are none.
    """

    count: int = 0
    types: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    reason: str = ""

    def describe(self) -> str:
        """One line."""
        parts = (f"{op} {format_counts(Counter(types))}" for op, types in self.types.items())
        return self.reason or f"{', '.join(parts)}; {self.count} in all"


@dataclass(frozen=True, kw_only=True)
class KernelChange:
    """The kernels of the old file and of the new one in the target's engine."""

    engine: str
    before: KernelTypes
    after: KernelTypes


@show_as_summary
@dataclass(frozen=True, kw_only=True, eq=False)
class Conversion:
    """A converted file. result: the model, with its account. sites: where the numbers of each come from.

    kernels: None where the engine is not installed, or was not asked. answers: None where nothing was run.
    """

    result: Result
    to: str
    sites: MovedSites = ()
    kernels: KernelChange | None = None
    answers: Answers | None = None

    @property
    def report(self) -> Report:
        """The account of the file."""
        return self.result.report

    @property
    def applied(self) -> Report | None:
        """The account, where an engine was asked for, also where it takes none of the pairs."""
        return None if self.to == FLOAT else self.report


def convert(
    model: ModelSource,
    to: str,
    data: object = None,
    config: Configuration = None,
    *,
    overrides: Overrides = None,
    out: OutputPath = None,
    force: bool = False,
    progress: Progress = silent,
) -> Conversion:
    """Make a file with Q/DQ pairs, of any tool, fit another engine, without its float original.

    to: a target, or "float" for the model without pairs, whose weights stay as they were rounded. data: samples for
    ranges that the file does not have; without it their operators are left float. config: by default the preset of the
    target, as `trt-int8`; see `quantize` for the rest.

    Returns a Conversion with `.result` and, for each site, how its numbers came about.
    Raises ModelError for a file without pairs, ConfigError for a target that does not exist.
    """
    # The configuration follows the form of the file, which so is read first; outputs are checked before that.
    options = expand_names(overrides, Command.CONVERT).items()
    outputs = {key: value for key, value in options if key.startswith("output.")}
    usual = None if to == FLOAT else config or f"{to}-int8"
    with open_run(model, usual, outputs, Command.CONVERT, out=out, force=force) as chosen:
        with progress("reading the quantized model"):
            source = read_quantized(
                model, lookups=to == FLOAT or not find_backend(chosen.target).reference
            )
        if config is None and to != FLOAT:
            config, overrides = _choose_form(source, to, overrides)
        with open_run(model, config, overrides, Command.CONVERT, out=out, force=force) as chosen:
            if to == FLOAT:
                return _write_float(source, out, force)
            # A file of several engines names them all.
            if chosen.target != to:
                cause = f"the configuration is for {chosen.target!r}"
                raise ConfigError(
                    f"to={to!r}",
                    cause,
                    "name a preset of this target, or no configuration",
                    code="Q312",
                )
            done = retarget(source, data, chosen, progress=progress)
            result = write_result(done.result, chosen, out, force, progress)
            kernels = _compare_kernels(source, result, chosen, progress)
            return Conversion(
                result=result, to=to, sites=done.sites, kernels=kernels, answers=done.answers
            )


def _choose_form(source: QuantizedSource, to: str, overrides: Overrides) -> tuple[str, Overrides]:
    """The preset of a target for the form that a file has, and the overrides with its bits and blocks."""
    mode = source.mode
    grains = Counter(site.spec for site in source.existing.constants if site.spec.has_blocks)
    if mode == "dynamic" and f"{to}-dynamic" in list_presets():
        return f"{to}-dynamic", overrides
    if mode != "weight-only":
        widths = [pair.spec.bits for pair in source.existing.by_tensor.values()]
        # Where the engine computes on 16 bits, a file of 16 bits stays one.
        wide = f"{to}-a16w8" if 2 * widths.count(16) > len(widths) else ""
        return wide if wide in list_presets() else f"{to}-int8", overrides
    spec = grains.most_common(1)[0][0] if grains else None
    bits = 4 if spec is not None and spec.bits <= 4 else 8
    preset = f"{to}-int{bits}-weights"
    own = {}
    if preset not in list_presets():
        preset = f"{to}-int8"
        own = {"mode": "weight-only", "weights.bits": bits}
        asymmetric = {
            "weights.scheme": "asymmetric",
            "weights.signed": False,
            "weights.storage": f"uint{bits}",
        }
        if spec is not None and not spec.symmetric and _is_valid(preset, own | asymmetric):
            own |= asymmetric
    if spec is not None and isinstance(spec.granularity, PerBlock):
        own |= {
            "weights.granularity": "block",
            "weights.block_size": spec.granularity.size,
            "projection_bits": bits,
        }
    asked = drop_unset(overrides)
    if asked.get("emit") == "nbits":
        # Of MatMulNBits; pairs say nothing of the bits that products compute on.
        nodes = get_index(source.proto).nodes
        own["accuracy_level"] = max(
            (node.read_int("accuracy_level", 0) for node in nodes), default=0
        )
    return preset, own | asked


def _is_valid(preset: str, settings: Settings) -> bool:
    """True where the target takes these settings."""
    try:
        load_config(preset, settings)
    except ConfigError:
        return False
    return True


def _compare_kernels(
    source: QuantizedSource, result: Result, config: Config, progress: Progress
) -> KernelChange | None:
    """The kernels that the target's engine makes of both files; None where there is none to ask."""
    engine = next(
        (engine for engine in find_backend(config.target).engines if engine.installed), None
    )
    if engine is None or not config.convert.kernels or is_large_model(result.light):
        return None
    options = ProveConfig(engine=engine.name)
    request = ProveRequest(options=options, runtime=config.runtime, progress=progress)
    before, after = (_count_kernels(file, request) for file in (source.origin, result.model))
    return KernelChange(engine=engine.describe_version(), before=before, after=after)


def _count_kernels(file: ModelSource, request: ProveRequest) -> KernelTypes:
    try:
        proof = prove_model(file, request)
    except OnnxqError as error:
        # The one file may be what the engine refuses, which is why it is converted.
        reason = f"not built: {error.fault}"
    else:
        if proof.built:
            return KernelTypes(count=len(proof.kernels), types=proof.by_op())
        reason = f"{proof.build.state}: {proof.build.reason}"
    return KernelTypes(reason=reason.partition("\n")[0])


def _write_float(source: QuantizedSource, out: OutputPath, force: bool) -> Conversion:
    # Nothing is planned or run: the pairs are taken out, and that is all.
    floats = source.restore_types()
    name = name_file(source.origin)
    report = Report(
        source=name, target=FLOAT, output_bytes=measure_size(floats), warnings=warn_integers(source)
    )
    # It has no pairs, and so a plan without sites.
    result = Result(floats, Plan(target=FLOAT, model=name, topology="", weights=""), report)
    if out is not None:
        save_model(floats, Path(out), overwrite=force)
        result = result.change_report(output=str(out))
    return Conversion(result=result, to=FLOAT)


def _make_parts(done: Conversion, view: terminal.TextView) -> terminal.Parts:
    yield Text(f"{done.report.source or 'model'} -> {done.report.output or done.to}", style="bold")
    yield terminal.make_sheet(_make_rows(done))
    if view.verbose and done.sites:
        columns = ("site", "role", "numbers", "error")
        rows = [
            (
                s.site,
                s.role,
                s.how.value,
                "" if s.error_db is None else terminal.format_decibel(s.error_db),
            )
            for s in done.sites
        ]
        yield terminal.make_table(columns, rows, right=columns[3:], names=columns[:1])
    yield Text()


def _make_rows(done: Conversion) -> terminal.SheetRows:
    counts = Counter(site.how for site in done.sites)
    yield "numbers", tuple(f"{count} {kind.value}" for kind, count in counts.items())
    # Those that a person may want to look at, one by one.
    rounded = [site for site in done.sites if site.how is Kept.ROUNDED]
    yield (
        "rounded anew",
        tuple(f"{site.site}: {terminal.format_decibel(site.error_db or 0.0)}" for site in rounded),
    )
    kernels = done.kernels
    answers = done.answers
    if kernels is not None:
        yield (
            f"in {kernels.engine}",
            (f"before: {kernels.before.describe()}", f"after: {kernels.after.describe()}"),
        )
    if answers is not None:
        before, after, both = map(
            terminal.format_decibel, (answers.before, answers.after, answers.agreement)
        )
        against = f"against the file's weights in float, on {terminal.format_count(answers.samples, 'sample')}"
        yield (
            "answers",
            (
                f"before: {before}, after: {after}, {against}",
                f"{both} against the file that it came from",
            ),
        )


FORM = ResultFormat[Conversion](
    make_parts=_make_parts,
    # Those for an engine stand in the account of its file.
    list_warnings=lambda done: () if done.applied else done.report.warnings,
    derive=lambda done: {"applied": done.applied},
    hidden="result",
)
