"""`onnxq calibrate` and `onnxq merge`: each job observes a shard of the samples, and one joins the parts."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from onnxq.calibrate.parts import Part, join_parts, read_part, split_evenly, write_part
from onnxq.calibrate.run import observe_part
from onnxq.config import Command
from onnxq.errors import ConfigError, PlanError
from onnxq.files import AnyPath, guard_outputs, write_text
from onnxq.passes.base import EqualizeContext
from onnxq.pipeline import Configuration, ModelSource, OutputPath, Overrides, open_run
from onnxq.pipeline.quantize_model import open_context, plan_run, prepare_run
from onnxq.progress import Progress, silent
from onnxq.report import ResultFormat, Text, TextView, Values


def calibrate_part(
    model: ModelSource,
    data: object = None,
    config: Configuration = None,
    *,
    shard: str = "1/1",
    overrides: Overrides = None,
    out: OutputPath = None,
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
                raise PlanError(
                    "the model", "is not run: there is nothing to calibrate", fix, code="Q405"
                )
            samples = ctx.data.ranges
            number, count = _read_shard(shard, len(samples))
            positions = split_evenly(range(len(samples)), count)[number - 1]
            with progress("planning"):
                placed = plan_run(ctx, state, "")
            part = observe_part(
                placed.model,
                placed.plan,
                samples,
                positions,
                batch=chosen.data.batch,
                memory_limit=ctx.memory_limit,
                crew=ctx.crew,
                progress=progress,
            )
        return _write_part(part, out, force)


def merge_parts(parts: Sequence[AnyPath], *, out: OutputPath = None, force: bool = False) -> Part:
    """Merge parts that `calibrate_part` wrote, in any order; merged ones may be merged again.

    out: write the merged part as JSON. Raises CalibrationError for files that are no parts, or do not belong together.
    """
    with guard_outputs("", out, force=force):
        return _write_part(join_parts([read_part(path) for path in parts]), out, force)


def _read_shard(shard: str, samples: int) -> tuple[int, int]:
    """The number of a shard and the count of all. ConfigError for other text, and for more shards than samples."""
    first, _, last = shard.partition("/")
    if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise ConfigError(
            f"shard={shard!r}",
            "is not NUMBER/COUNT",
            "write 2/8 for the second of eight",
            code="Q304",
        )
    if int(last) > samples:
        cause = f"there are only {samples} samples to share out"
        raise ConfigError(f"shard={shard!r}", cause, f"make at most {samples} shards", code="Q304")
    return int(first), int(last)


def _write_part(part: Part, out: OutputPath, force: bool) -> Part:
    """The part with the file that it was written to, if there is one, as its source."""
    if out is not None:
        write_text(Path(out), write_part(part), overwrite=force)
    return replace(part, source=str(out or ""))


def _describe_part(part: Part) -> Values:
    """The facts of a part, without its numbers."""
    # `error` stands there for programs that look for it in every document; the command ends with none.
    facts = {
        "output": part.source,
        "ranges": len(part.wants),
        "total": part.total,
        "samples": sorted(part.samples),
    }
    return {"error": None, "part": facts, "missing": part.missing, "keys": part.keys}


def _make_line(part: Part, _: TextView) -> list[Text]:
    """A line with the number of samples that a part holds, and of those that are missing."""
    missing = f"; {len(part.missing)} are in other parts" if part.missing else ": it is whole"
    text = f"{len(part.wants)} ranges over {len(part.samples)} of {part.total} samples{missing}"
    return [Text(f"{part.source}: {text}" if part.source else text)]


FORM = ResultFormat[Part](make_parts=_make_line, only=_describe_part)
