"""The configuration of one call: checked against all that it names, its outputs guarded, the crew that it asks for."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path, PurePath

import onnx

from onnxq.backends import check_limits, check_target, list_backends, load_config, split_target
from onnxq.config import Command, Config, check_trust, expand_names, join_words, list_options
from onnxq.config.data import ScaleConfig
from onnxq.errors import ConfigError, replace_surrogates
from onnxq.files import AnyPath, guard_outputs, refuse_inputs
from onnxq.graph import ModelSource, name_file
from onnxq.graph.save import check_data_name, name_data_file
from onnxq.numerics.machine import use_blas_threads
from onnxq.observers import check_observers
from onnxq.passes.mixed_precision.weight_bits import check_budget
from onnxq.passes.registry import check_skip
from onnxq.runtime import UnknownOperatorError, check_libraries, check_provider
from onnxq.runtime.crew import Crew
from onnxq.sites import Caution, Cautions, Settings
from onnxq.workers import Journal, Workers
from onnxq.workers.dask import DaskWorkers
from onnxq.workers.processes import ProcessWorkers

Configuration = Config | AnyPath | None
Overrides = Settings | None
# A file or folder to write; None for none.
OutputPath = AnyPath | None


def name_model(model: object) -> str:
    """The name of a model for plans and messages: that of its file."""
    path = name_file(model)
    return replace_surrogates(PurePath(path).name) if path else "model"


def name_models(models: Sequence[ModelSource] | ModelSource) -> dict[str, ModelSource]:
    """Models given as one or as many, by names of their own. Raises ConfigError for none."""
    sources = [models] if isinstance(models, (str, Path, onnx.ModelProto)) else list(models)
    if not sources:
        raise ConfigError("models", "none was given", "give at least one", code="Q304")
    named = {}
    for number, source in enumerate(sources, 1):
        name = f"model {number}" if isinstance(source, onnx.ModelProto) else str(source)
        # The same file twice shows the spread of the clock.
        named[f"{name} ({number})" if name in named else name] = source
    return named


def make_config(
    config: Configuration, overrides: Overrides, command: Command, *, usual: str | None = None
) -> Config:
    """Make the configuration of a command: a preset, file or Config with the caller's options on top.

    None, and a file that names no target, start from the preset of the target in the options, as `NAME-int8`; without
    one from that of `usual`, by default ONNX Runtime's.
    Raises ConfigError for what is wrong in it, and for a target other than the configuration's.
    """
    settings = expand_names(overrides, command)
    target = join_words(settings.get("target"))
    base = load_config(config, target=target or usual)
    # A configuration for one engine of several serves as their base.
    if (
        config is not None
        and target is not None
        and base.target not in (target, *split_target(str(target)))
    ):
        cause = f"the configuration {base.source!r} is for {base.target!r}"
        raise ConfigError(f"target {target!r}", cause, "choose one", code="Q312")
    chosen = load_config(base, settings)
    check_trust(chosen, settings)
    check_target(chosen)
    check_observers(chosen)
    check_skip(chosen)
    check_budget(chosen)
    return check_limits(chosen)


@contextmanager
def open_run(
    model: ModelSource,
    config: Configuration,
    overrides: Overrides,
    command: Command,
    *,
    out: OutputPath = None,
    force: bool = False,
    usual: str | None = None,
) -> Iterator[Config]:
    """Give the configuration of `make_config`, with its libraries of operators loaded and the outputs guarded.

    Until the end, matrix products take one thread.

    Raises OutputError, before the work begins, for outputs that could not be written after it, or that are inputs.
    """
    name = name_file(model)
    # The configuration is read inside a guard, because it is an input, too.
    # On small matrices threads wait more than they gain; what multiplies large ones asks for all.
    with use_blas_threads(one=True), guard_outputs(name, out, force=force):
        chosen = make_config(config, overrides, command, usual=usual)
        files = list(_list_outputs(chosen, command, out))
        refuse_inputs(map(Path, files))
        with guard_outputs(name, *files, force=force):
            runtime = chosen.runtime
            ready = {
                "libraries": check_libraries(runtime.libraries),
                # dlopen looks for a bare file name in the system's folders, not in the working directory.
                "plugins": tuple(str(Path(path).resolve()) for path in runtime.plugins),
                "provider": check_provider(runtime.provider) if runtime.provider else "",
            }
            try:
                yield chosen.model_copy(update={"runtime": runtime.model_copy(update=ready)})
            except UnknownOperatorError as error:
                # Runtime knows no backends, and so none that keeps such operators.
                advice = (backend.plugin_advice for backend in list_backends())
                raise error.replace_text(
                    fix="; or, ".join([error.fix, *filter(None, advice)])
                ) from error


# Options that name files to be written.
_WRITTEN = (
    "output.plan",
    "report.markdown",
    "report.mermaid",
    "report.node_data",
    "report.graph",
    "search.rules",
    "search.csv",
    "search.plot",
    "output.report",
    "output.compiled",
)


def _list_outputs(config: Config, command: Command, out: OutputPath) -> Iterator[AnyPath]:
    """The files that a command writes. Options of the configuration that it does not take are left out."""
    taken = {option.path for option in list_options(command)}
    if out is not None:
        yield out
        if config.output.external_data and "output.external_data" in taken:
            check_data_name(Path(out))
            yield name_data_file(out)
    yield from filter(None, (attrgetter(path)(config) for path in _WRITTEN if path in taken))


# The value of `resume` for a folder beside the model.
BESIDE = "auto"


def open_crew(config: ScaleConfig, model: object) -> Crew:
    """The crew, to be used in a `with` block; processes start with the first pieces.

    model: the path that the folder is named after, where none was named. Raises ConfigError for options that exclude
    each other, OutputError for a folder that cannot be made, WorkerError for a cluster that does not answer.
    """
    if config.dask and config.workers > 1:
        raise ConfigError(
            "dask", "and workers were both given", "leave `workers=…` out", code="Q317"
        )
    journal = Journal(_find_folder(config.resume, model)) if config.resume else None
    if config.dask:
        return Crew(DaskWorkers(config.dask, journal))
    return Crew(ProcessWorkers(config.workers, journal) if config.workers > 1 else Workers(journal))


def _find_folder(resume: str, model: object) -> Path:
    if resume != BESIDE:
        return Path(resume)
    if not isinstance(model, (str, Path)):
        raise ConfigError(
            "resume", "the model is no file to be beside", "name a folder: `resume=…`", code="Q317"
        )
    path = Path(model)
    return path.with_name(f"{path.name}.resume")


def describe_journal(crew: Crew) -> Cautions:
    """A line for pieces in the folder that this run had no use for."""
    journal = crew.workers.journal
    left = 0 if journal is None else journal.earlier - journal.used
    if journal is None or not left:
        return ()
    text = (
        f"{left} of {journal.earlier} finished pieces in {journal.folder} are of other weights, data, configurations "
        "or versions, and were not used"
    )
    return (Caution("W128", text),)
