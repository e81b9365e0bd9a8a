"""The finished model on its target's own engine, run or emulated here: its parts, types and answers."""

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from onnxq.arrays import map_shapes
from onnxq.backends.engine import Engine, Job, Runner
from onnxq.engines.bench import fit_feeds
from onnxq.engines.prove.judge import count_types
from onnxq.errors import OnnxqError
from onnxq.evaluation.compare import ModelErrors, ReferenceRunner
from onnxq.files import ScratchFolder
from onnxq.graph import ModelLike, fix_noise, fix_sizes, get_index
from onnxq.passes import FloatState, RunContext
from onnxq.progress import Task
from onnxq.report.model import EngineCheck, EngineOutput
from onnxq.runtime import Feeds, Session

# Emulation is slow, as large models are: no further sample begins after so many seconds.
_SECONDS = 60.0
# Answers that agree less with the file, dB, may be those of an engine that computes an operator
# otherwise, as OpenVINO does RNN and antialiased Resizes.
_FAR_DB = 20.0


def check_on_engine(
    ctx: RunContext, state: FloatState, model: ModelLike, engine: Engine, account: EngineCheck
) -> EngineCheck | None:
    """Compile the model, and run the held-back samples, or emulate some; None where none are asked for.

    account: to be filled in. An engine that is not installed, or fails, gives its reason in the place of figures.
    """
    if ctx.samples is None:
        return None
    count = ctx.config.verify.emulated if engine.emulated else len(ctx.samples.test)
    if not count:
        return None
    obstacle = engine.find_obstacle()
    if obstacle is not None:
        return replace(account, reason=f"{obstacle.reason}: {obstacle.fix}")
    engine = engine.with_options(ctx.config.runtime)
    reference = ReferenceRunner(state.named, optimize=False)
    # Whatever the float model chooses by computed values, the largest scores for one, the file takes.
    taking = fix_noise(reference.selections.take_choices(model))
    kernels = None
    try:
        title = f"building for {engine.title}, and running {count} samples there"
        with ctx.progress(title, count) as task:
            samples = ctx.samples.test.take(count).samples()
            with _open_runner(engine, "quantized", model) as (runner, folder):
                kernels = engine.read_kernels(model, folder)
                placement = engine.read_placement(model, folder)
                if taking is model:
                    off, agree = _sum_errors(reference, model, runner, samples, task)
            if taking is not model:
                with _open_runner(engine, "quantized", taking) as (runner, _):
                    off, agree = _sum_errors(reference, taking, runner, samples, task)
    except OnnxqError as error:
        reason = error.fault
        if kernels is not None:
            return replace(account, reason=reason)
        # A file is at fault only where the engine takes the model that it was made of.
        refusal = "it refuses the float model, too"
        if _takes_model(engine, state.named):
            refusal = "it takes the float model"
        elif _takes_model(engine, fix_sizes(state.named, map_shapes(ctx.samples.first))):
            refusal += ", but takes it with the sizes of the samples: `fix=…`"
        return replace(account, reason=reason, refusal=refusal)
    floats = {}
    if not engine.emulated and any(result.sqnr_db < _FAR_DB for result in agree.results()):
        floats = _measure_float(ctx, engine, reference, state.named)
    if placement is not None:
        left = tuple(refusal.subject for refusal in placement.left)
        account = replace(account, partitions=placement.partitions, left=left)
    return replace(
        account,
        emulated=engine.emulated,
        samples=off.count,
        outputs=_list_outputs(off, agree, floats),
        types=count_types(get_index(model), kernels, engine.words),
    )


@contextmanager
def _open_runner(engine: Engine, name: str, model: ModelLike) -> Iterator[tuple[Runner, Path]]:
    """Build a model for an engine; gives what runs it, and the folder of what the engine wrote."""
    with (
        ScratchFolder() as folder,
        engine.open_runner(name, model, Job(), folder) as runner,
    ):
        yield runner, folder


def _list_outputs(
    off: ModelErrors, agree: ModelErrors, floats: Mapping[str, float]
) -> tuple[EngineOutput, ...]:
    return tuple(
        EngineOutput(
            name=plain.name,
            sqnr_db=plain.sqnr_db,
            agreement_db=both.sqnr_db,
            float_db=floats.get(plain.name, math.inf),
        )
        for plain, both in zip(off.results(), agree.results(), strict=True)
    )


def _sum_errors(
    reference: ReferenceRunner,
    model: ModelLike,
    runner: Runner,
    samples: Iterable[Feeds],
    task: Task,
) -> tuple[ModelErrors, ModelErrors]:
    """The errors of an engine's answers against the float model, and against the file. model: as it takes choices."""
    file = Session(model, optimize=False)
    begun = time.monotonic()
    off = ModelErrors()
    agree = ModelErrors()
    for feeds in samples:
        wanted = reference.run(feeds)
        taken = fit_feeds(get_index(model).inputs, reference.selections.add_choices(feeds, wanted))
        said = file.run(taken)
        answers = runner.infer(taken)
        off.update(feeds, wanted, answers)
        # Without its own choices.
        agree.update(
            feeds, {name: value for name, value in said.items() if name in wanted}, answers
        )
        task.advance()
        if time.monotonic() - begun > _SECONDS:
            break
    return off, agree


def _measure_float(
    ctx: RunContext, engine: Engine, reference: ReferenceRunner, model: ModelLike
) -> dict[str, float]:
    """SQNR in dB of the float model's outputs as the engine computes them, on one sample; {} where it does not."""
    assert ctx.samples is not None
    taking = fix_noise(reference.selections.take_choices(model))
    try:
        with (
            ctx.progress(f"running the float model with {engine.title}", 1) as task,
            _open_runner(engine, "float", taking) as (runner, _),
        ):
            off, _ = _sum_errors(
                reference, taking, runner, ctx.samples.test.take(1).samples(), task
            )
    except OnnxqError:
        return {}
    return {result.name: result.sqnr_db for result in off.results()}


def _takes_model(engine: Engine, model: ModelLike) -> bool:
    """True where the engine builds a model."""
    try:
        with _open_runner(engine, "float", model):
            return True
    except OnnxqError:
        return False
