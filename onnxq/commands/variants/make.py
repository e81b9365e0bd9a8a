"""`onnxq variants`: the quantized files of a model that hubs hold, made in one go and checked against float."""

import filecmp
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import onnx

from onnxq.arrays import map_shapes
from onnxq.backends import check_limits, find_reference, find_target, list_backends, load_config
from onnxq.commands.variants.result import FLOAT, FORM, Variant, Variants, VariantState
from onnxq.config import Command, Config, change_fields, expand_names
from onnxq.data import Dataset, load_data
from onnxq.errors import ConfigError, OnnxqError
from onnxq.evaluation.metric import Drop, Metric, load_metric, parse_drop
from onnxq.files import check_outputs, name_folder, prepare_folder, refuse_inputs, replace_files
from onnxq.files.scratch import ScratchFolder
from onnxq.graph import Model, ModelLike, add_libraries, load_model, name_nodes, save_model
from onnxq.graph.index import GraphIndex
from onnxq.pipeline import ModelSource, name_file, quantize_model
from onnxq.pipeline.configuration import Configuration, OutputPath, Overrides, open_run
from onnxq.pipeline.finalize import Result, count_bytes, list_files
from onnxq.progress import Progress, silent
from onnxq.runtime import Latency, Session, convert_floats, detect_cpu, time_models
from onnxq.runtime.session import import_onnxruntime
from onnxq.sites import JsonObject, Names, Settings

# Where transformers.js looks, below the folder of the repository.
_FOLDER = "onnx"
_RECORD = "quantize_config.json"
# Of the configuration: all else is the caller's.
_OF_PRESETS = ("target", "mode", "activations", "weights", "projection_bits", "high_precision")
# Of the float file's size: hubs hold variants to be downloaded, and what is placed for speed may be as large.
_SMALLER = 0.8
# Seconds that timing all files takes at most.
_TIMING_SECONDS = 20.0
# The alarm for answers that are far from the float model's, and those that the table shows in words of its own.
_LOST = "W108"
_SHOWN = ("W101", "W108", "W110", "W111")


@dataclass(frozen=True, kw_only=True)
class _Recipe:
    """suffix: of the file. presets: in order of preference; the first whose file is smaller is taken."""

    dtype: str
    suffix: str
    presets: Names
    settings: Settings = field(default_factory=dict)


# Suffixes: DEFAULT_DTYPE_SUFFIX_MAPPING of transformers.js 3. In browsers it loads q8 unasked, which
# therefore has to be there for networks without MatMuls too, and is placed by what pays in browsers.
_RECIPES = (
    _Recipe(
        dtype="fp16",
        suffix="_fp16",
        presets=("ort-int8",),
        settings={"mode": "float", "high_precision": "float16"},
    ),
    _Recipe(dtype="int8", suffix="_int8", presets=("ort-int8",)),
    _Recipe(
        dtype="q8", suffix="_quantized", presets=("web-dynamic", "web-int8", "web-int8-weights")
    ),
    _Recipe(dtype="q4", suffix="_q4", presets=("ort-int4-weights",)),
    _Recipe(
        dtype="q4f16",
        suffix="_q4f16",
        presets=("ort-int4-weights",),
        settings={"high_precision": "float16"},
    ),
)
# By dtype; the float model's, too.
_SUFFIXES = {FLOAT: "", **{recipe.dtype: recipe.suffix for recipe in _RECIPES}}


@dataclass(frozen=True, eq=False)
class _Run:
    """All that the variants have in common. scratch: where their files lie until all are made."""

    source: ModelSource
    config: Config
    original: Model
    named: ModelLike
    dataset: Dataset
    stem: str
    scratch: Path
    metric: Metric | None
    drop: Drop | None
    progress: Progress

    def find_file(self, dtype: str) -> Path:
        """Where the variant of this dtype, or the float model, lies until all are made."""
        return self.scratch / f"{self.stem}{_SUFFIXES[dtype]}.onnx"

    def open_file(self, path: Path) -> ModelLike:
        """The file read back, to be run as the model is."""
        return add_libraries(
            load_model(path).proto, self.config.runtime.libraries, self.config.runtime.provider
        )

    def measure_metric(self, model: ModelLike) -> float | None:
        """The metric; None where none was asked for."""
        return (
            None if self.metric is None else self.metric(model, threads=self.config.verify.threads)
        )


def variants(
    model: ModelSource,
    data: object = None,
    config: Configuration = None,
    *,
    overrides: Overrides = None,
    out: OutputPath = None,
    force: bool = False,
    progress: Progress = silent,
) -> Variants:
    """Make the variants of a model that hubs hold: float16, int8 and 4 bits, each checked against float and timed.

    data: as for `quantize`; without it there is no int8 variant with scales in the file. config, overrides: as for
    `quantize`, of which mode, types of weights and activations, and `high_precision` are the variants' own.
    out: a folder, which gets `onnx/<name><suffix>.onnx` as transformers.js looks for them, the float model itself, and
    `onnx/<name>_quantize_config.json`, which says how each was made; None writes nothing. force: overwrite them.
    Variants whose answers are lost are left out, unless `keep_broken` is given.

    Returns Variants with `.original` and `.variants`, each with its size, SQNR, latency and state.
    Raises a subclass of OnnxqError where the model, the data or the options are wrong, and where every variant fails.
    """
    folder = name_folder(out)
    # All files or none: they lie in the scratch folder until the last one is made and checked.
    with open_run(model, config, overrides, Command.VARIANTS) as chosen, ScratchFolder() as scratch:
        options = _check_options(chosen, overrides)
        only = chosen.variants.only
        recipes = [recipe for recipe in _RECIPES if recipe.dtype in only or not only]
        run = _open_model(model, data, chosen, scratch, progress)
        source = _name_source(config)
        if folder is None:
            return replace(_make_all(run, recipes), config=source, options=options)
        dtypes = (FLOAT, *(recipe.dtype for recipe in recipes))
        targets = {dtype: folder / _FOLDER / run.find_file(dtype).name for dtype in dtypes}
        targets[_RECORD] = folder / _FOLDER / f"{run.stem}_{_RECORD}"
        with _guard_files(folder, run, targets, force=force):
            result = replace(_make_all(run, recipes), config=source, options=options)
            return _write_files(result, run, targets, force=force)


def _check_options(config: Config, overrides: Overrides) -> JsonObject:
    """The options that all variants were made with. Raises ConfigError for those that each has of its own."""
    options = expand_names(overrides, Command.VARIANTS)
    taken = next((key for key in options if key.partition(".")[0] in _OF_PRESETS), None)
    if taken is not None:
        raise ConfigError(
            f"option: {taken}",
            "each variant has its own",
            "leave it out, or use `quantize`",
            code="Q317",
        )
    if not find_target(config.target).times_itself:
        cause = f"the configuration {config.source!r} is for {config.target!r}, and hubs hold files for ONNX Runtime"
        raise ConfigError(
            "target", cause, f"choose a configuration for `{find_reference().name}`", code="Q312"
        )
    section = config.variants
    if section.max_drop is not None and section.metric is None:
        raise ConfigError(
            "max_drop", "says nothing without a metric", "give `metric=…` as well", code="Q308"
        )
    if Path(section.name).name != section.name:
        raise ConfigError(
            f"name {section.name!r}",
            "is no name of a file",
            "write e.g. decoder_model",
            code="Q304",
        )
    return {key: value for key, value in options.items() if key.partition(".")[0] != "variants"}


def _open_model(
    model: ModelSource, data: object, config: Config, scratch: Path, progress: Progress
) -> _Run:
    original = load_model(model)
    runtime = config.runtime
    section = config.variants
    named = name_nodes(add_libraries(original.proto, runtime.libraries, runtime.provider))
    return _Run(
        source=model,
        config=config,
        original=original,
        named=named,
        dataset=load_data(data, GraphIndex(named).inputs, config.data, named, progress=progress),
        stem=section.name or ("model" if original.path is None else original.path.stem),
        scratch=scratch,
        metric=None if section.metric is None else load_metric(section.metric),
        drop=None if section.max_drop is None else parse_drop(section.max_drop),
        progress=progress,
    )


def _name_source(config: Configuration) -> str:
    return "" if config is None else config.source if isinstance(config, Config) else str(config)


@contextmanager
def _guard_files(
    out: Path, run: _Run, targets: Mapping[str, Path], *, force: bool
) -> Iterator[None]:
    """Make the folder, and check that the files can be written there. New folders that stay empty are removed."""
    files = [path for path in targets.values() if not _is_same_file(path, run.original.path)]
    with prepare_folder(out, ()), prepare_folder(out / _FOLDER, [path.name for path in files]):
        check_outputs("", *files, force=force)
        refuse_inputs(files, run.original.files)
        yield


def _is_same_file(target: Path, other: Path | None) -> bool:
    """True where the float model lies in its place already."""
    return other is not None and os.path.realpath(target) == os.path.realpath(other)


def _make_all(run: _Run, recipes: Sequence[_Recipe]) -> Variants:
    """All variants, their files in the scratch folder. Raises the first error where every one fails."""
    save_model(run.original.proto, run.find_file(FLOAT))
    original = Variant(
        dtype=FLOAT,
        size_bytes=count_bytes(run.find_file(FLOAT)),
        metric=run.measure_metric(run.named),
    )
    variants: list[Variant] = []
    errors = []
    for recipe in recipes:
        with run.progress(f"making {recipe.dtype}"):
            try:
                variant = _make_variant(run, recipe, original)
                variants.append(replace(variant, same_as=_find_twin(run, variant, variants)))
            except OnnxqError as error:
                errors.append(error)
                failed = Variant(
                    dtype=recipe.dtype,
                    state=VariantState.FAILED,
                    settings=recipe.settings,
                    reason=error.fault,
                )
                variants.append(failed)
    if errors and len(errors) == len(variants):
        raise errors[0]
    times = _time_files(run, (original, *variants))
    return Variants(
        source=name_file(run.original.path),
        original=replace(original, latency=times.get(FLOAT)),
        variants=tuple(replace(variant, latency=times.get(variant.dtype)) for variant in variants),
        metric="" if run.metric is None else run.metric.name,
        checked=max((variant.checked for variant in variants), default=0),
        data=run.dataset.describe(),
        synthetic=run.dataset.synthetic,
        seed=run.config.data.seed,
        cpu=detect_cpu(),
        shapes=map_shapes(run.dataset[0]),
        versions={
            "onnxq": version("onnxq"),
            "onnx": onnx.__version__,
            "onnxruntime": import_onnxruntime().__version__,
        },
    )


def _make_variant(run: _Run, recipe: _Recipe, original: Variant) -> Variant:
    """One variant, its file in the scratch folder. Raises OnnxqError where it fails."""
    variant = Variant(dtype=recipe.dtype, preset=recipe.presets[0], settings=recipe.settings)
    configs = [_make_config(run.config, preset, recipe.settings) for preset in recipe.presets]
    if run.dataset.synthetic:
        configs = [config for config in configs if config.mode != "static"]
    chosen = None
    for config in configs:
        # Without samples nothing must be calibrated on those that were made up for the timing.
        data = None if run.dataset.synthetic else run.dataset
        result = quantize_model.quantize(run.source, data, config, progress=run.progress)
        # A file in float16 has no pairs.
        if result.report.pairs or config.mode == "float":
            chosen = config, result
            # Where none is small enough, the last that quantizes something is taken.
            if result.report.output_bytes <= _SMALLER * original.size_bytes:
                break
    if chosen is None:
        return replace(variant, state=VariantState.NOTHING if configs else VariantState.NO_SAMPLES)
    config, result = chosen
    variant = replace(variant, preset=config.source)
    return _check_file(run, variant, result, original)


def _find_twin(run: _Run, variant: Variant, earlier: Sequence[Variant]) -> str:
    """The dtype of an earlier variant whose file has the same bytes; "" for none."""
    for other in earlier:
        one, two = map(run.find_file, (other.dtype, variant.dtype))
        if 0 < other.size_bytes == variant.size_bytes and filecmp.cmp(one, two, shallow=False):
            return other.dtype
    return ""


def _make_config(config: Config, preset: str, settings: Settings) -> Config:
    """The caller's configuration with the types of a preset."""
    base = load_config(preset, settings)
    # Times of pairs of models would not compare with each other: all files are timed at the end, side by side.
    verify = change_fields(config.verify, latency=False, optimized=True)
    own = {key: getattr(base, key) for key in _OF_PRESETS}
    return check_limits(change_fields(config, **own, source=preset, verify=verify))


def _check_file(run: _Run, variant: Variant, result: Result, original: Variant) -> Variant:
    """Write the file, run it once, and fill in its figures. Raises ModelError where ONNX Runtime does not run it."""
    report = result.report
    path = run.find_file(variant.dtype)
    save_model(result.leave_out_notes(run.config.output.notes).light, path)
    model = run.open_file(path)
    session = Session(model, threads=run.config.verify.threads)
    session.run(convert_floats(run.dataset[0], session.inputs))
    metric = run.measure_metric(model)
    nodes = GraphIndex(name_nodes(model)).nodes
    tables = [table for backend in list_backends() for table in backend.tables]
    cautions = (*report.warnings, *report.alarms())
    dropped = (
        run.drop is not None
        and metric is not None
        and metric < run.drop.least(original.metric or 0.0)
    )
    lost = dropped or any(caution.code == _LOST for caution in cautions)
    off, on = (
        float(np.min([check.sqnr_db[k] for check in report.checks] or [np.nan])) for k in range(2)
    )
    return replace(
        variant,
        state=VariantState.LOST if lost else VariantState.MADE,
        size_bytes=count_bytes(path),
        sqnr_db=(off, on),
        checked=report.checked,
        metric=metric,
        lacking={table.title: table.list_missing(nodes) for table in tables},
        warnings=tuple(caution for caution in cautions if caution.code not in _SHOWN),
    )


def _time_files(run: _Run, variants: Sequence[Variant]) -> dict[str, Latency]:
    """Latency by dtype of the files that were made, side by side; {} where times are not wanted."""
    if not run.config.verify.latency:
        return {}
    with run.progress(f"timing the files, for at most {_TIMING_SECONDS:.0f} s"):
        files = {
            variant.dtype: run.open_file(run.find_file(variant.dtype))
            for variant in variants
            if variant.size_bytes
        }
        return time_models(
            files,
            run.dataset[0],
            threads=run.config.verify.threads,
            seconds=_TIMING_SECONDS,
            provider=run.config.runtime.provider,
        )


def _write_files(
    result: Variants, run: _Run, targets: Mapping[str, Path], *, force: bool
) -> Variants:
    """Move the files that are to be kept to their places, all of them and the record, or none."""
    written: Sequence[Variant] = result.usable
    if run.config.variants.keep_broken:
        written = [variant for variant in result.variants if variant.size_bytes]
    names = {variant.dtype: str(targets[variant.dtype]) for variant in written}
    sources = {targets[dtype]: run.find_file(dtype) for dtype in (FLOAT, *names)}
    if _is_same_file(targets[FLOAT], run.original.path):
        sources.pop(targets[FLOAT])
    parts = {
        target.with_name(part.name): part
        for target, path in sources.items()
        for part in list_files(path)
    }
    result = replace(
        result,
        original=replace(result.original, file=str(targets[FLOAT])),
        variants=tuple(
            replace(variant, file=names.get(variant.dtype, "")) for variant in result.variants
        ),
    )
    with run.progress("writing"):
        places = [targets[_RECORD], *parts]
        with replace_files(places, overwrite=force, inputs=run.original.files) as files:
            files[0].write(FORM.write_json(result).encode())
            for part, file in zip(parts.values(), files[1:], strict=True):
                with part.open("rb") as source:
                    shutil.copyfileobj(source, file)
    return result
