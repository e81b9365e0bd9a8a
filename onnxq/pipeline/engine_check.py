"""The finished model on its target's own engine, run or emulated here: its parts, types and answers."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from onnxq.backends.engine import Engine, Job
from onnxq.engines.bench import fit_feeds
from onnxq.engines.prove.judge import count_types
from onnxq.errors import OnnxqError
from onnxq.evaluation.compare import ModelErrors
from onnxq.files import ScratchFolder
from onnxq.graph import ModelLike, get_index
from onnxq.passes.base import RunContext
from onnxq.passes.state import FloatState
from onnxq.report.model import EngineCheck, EngineOutput
from onnxq.runtime import Session

# Emulation is slow, as large models are: no further sample begins after so many seconds.
_SECONDS = 60.0


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
    floats = Session(state.named, optimize=False)
    file = Session(model, optimize=False)
    off, agree = ModelErrors(), ModelErrors()
    done, begun = 0, time.monotonic()
    try:
        with (
            ctx.progress(f"building for {engine.title}, and running {count} samples there", count) as task,
            ScratchFolder() as folder,
            engine.open_runner("quantized", model, Job(), Path(folder)) as runner,
        ):
            kernels, placement = engine.read_kernels(model, folder), engine.read_placement(model, folder)
            for feeds in ctx.samples.test.take(count).samples():
                wanted, own = floats.run(feeds), fit_feeds(get_index(model).inputs, feeds)
                said, answers = file.run(own), runner.infer(own)
                off.update(feeds, wanted, answers)
                agree.update(feeds, said, answers)
                done += 1
                task.advance()
                if time.monotonic() - begun > _SECONDS:
                    break
    except OnnxqError as error:
        takes = _takes_model(engine, state.named)
        refusal = "it takes the float model" if takes else "it refuses the float model, too"
        return replace(account, reason=f"{error.subject}: {error.cause}", refusal=refusal)
    outputs = tuple(
        EngineOutput(name=plain.name, sqnr_db=plain.sqnr_db, agreement_db=both.sqnr_db)
        for plain, both in zip(off.results(), agree.results(), strict=True)
    )
    return replace(
        account,
        emulated=engine.emulated,
        samples=done,
        outputs=outputs,
        partitions=0 if placement is None else placement.partitions,
        left=() if placement is None else tuple(refusal.subject for refusal in placement.left),
        types=count_types(get_index(model), kernels, engine.words),
    )


def _takes_model(engine: Engine, model: ModelLike) -> bool:
    """True where the engine builds a model."""
    try:
        with ScratchFolder() as folder, engine.open_runner("float", model, Job(), Path(folder)):
            return True
    except OnnxqError:
        return False
