"""Calibration in shards, for batch systems: each job observes its part of the samples, and one merges the parts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from onnxq.calibrate.chunks import split_evenly
from onnxq.calibrate.parts import Part, join_parts, read_part, write_part
from onnxq.calibrate.run import observe_part
from onnxq.config import Command
from onnxq.errors import ConfigError, PlanError
from onnxq.files import guard_outputs, write_text
from onnxq.numerics.blas import use_one_blas_thread
from onnxq.passes.base import EqualizeContext
from onnxq.pipeline.configuration import Configuration, ModelSource, Overrides, open_run
from onnxq.pipeline.quantize_model import open_context, plan_run, prepare_run
from onnxq.progress import Progress, silent


@use_one_blas_thread()
def calibrate_part(
    model: ModelSource,
    data: object = None,
    config: Configuration = None,
    *,
    shard: str = "1/1",
    overrides: Overrides = None,
    out: str | Path | None = None,
    force: bool = False,
    progress: Progress = silent,
) -> Part:
    """Observe the activations of a model on one shard of the samples, as `quantize` would on all of them.

    shard: "2/8" for the second of eight. data: all samples, of which the shard's are run. The other arguments, which
    are those of `quantize`, have to be the same for all shards and for the run that takes the merged parts (the
    override `ranges`). out: write the part as JSON.
    Raises PlanError where nothing is to be calibrated, ConfigError for a shard that there is not.
    """
    with open_run(model, config, overrides, Command.QUANTIZE, out=out, force=force) as chosen:
        with open_context(model, data, chosen, progress) as ctx:
            ctx, state, _ = prepare_run(model, data, ctx)
            if not isinstance(ctx, EqualizeContext):
                fix = "quantize it without parts"
                raise PlanError("the model", "is not run: there is nothing to calibrate", fix, code="Q405")
            samples = ctx.data.ranges
            positions = split_evenly(range(len(samples)), _count_shards(shard, len(samples)))[
                int(shard.split("/")[0]) - 1
            ]
            with progress("planning"):
                placed = plan_run(ctx, state, "")
            part = observe_part(
                placed.model, placed.plan, samples, positions, batch=chosen.data.batch,
                memory_limit=ctx.memory_limit, crew=ctx.crew, progress=progress,
            )  # fmt: skip
        _write_part(part, out, force)
    return part


def merge_parts(parts: Sequence[str | Path], *, out: str | Path | None = None, force: bool = False) -> Part:
    """Merge parts that `calibrate_part` wrote, in any order; merged ones may be merged again.

    out: write the merged part as JSON. Raises CalibrationError for files that are no parts, or do not belong together.
    """
    with guard_outputs("", out, force=force):
        merged = join_parts([read_part(path) for path in parts])
        _write_part(merged, out, force)
    return merged


def _count_shards(shard: str, samples: int) -> int:
    """The number of shards. Raises ConfigError for text of another form, and for more shards than samples."""
    first, _, last = shard.partition("/")
    if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise ConfigError(f"shard={shard!r}", "is not NUMBER/COUNT", "write 2/8 for the second of eight", code="Q304")
    if int(last) > samples:
        cause = f"there are only {samples} samples to share out"
        raise ConfigError(f"shard={shard!r}", cause, f"make at most {samples} shards", code="Q304")
    return int(last)


def _write_part(part: Part, out: str | Path | None, force: bool) -> None:
    if out is not None:
        write_text(Path(out), write_part(part), overwrite=force)
