"""The command's own check of a model that no session should hold whole: a segment at a time."""

from __future__ import annotations

from onnxq.data.synthetic import make_synthetic
from onnxq.errors import OnnxqError
from onnxq.evaluation.agreement import AgreementSums
from onnxq.evaluation.segments import SegmentErrors, compare_segments
from onnxq.evaluation.selections import find_selections
from onnxq.graph import ModelLike, get_index
from onnxq.graph.light import bare_proto
from onnxq.graph.weights import count_tensor_bytes
from onnxq.passes.base import RunContext
from onnxq.passes.state import FloatState
from onnxq.pipeline.check import ModelCheck
from onnxq.report import OutputCheck
from onnxq.sites import Caution

# Bytes of weights that a segment has at least, if there are so many: fewer sessions, each of which takes time.
_SEGMENT_BYTES = 1 << 26
# Beside the largest weight, small ones go into its segment.
_BESIDE = 1.25
# Samples, of which all tensors between two segments are in memory.
_MOST_SAMPLES = 4
# Rows of the summary: the worst segments.
_SHOWN = 3


def check_segments(ctx: RunContext, state: FloatState, model: ModelLike) -> ModelCheck:
    """Float and quantized model on a few samples, each segment on the float model's own values; the worst ones."""
    index = get_index(state.named)
    agreement = AgreementSums(find_selections(state.named))
    largest = max((count_tensor_bytes(tensor) for tensor in bare_proto(state.named).graph.initializer), default=0)
    try:
        held = (
            make_synthetic(index.inputs, samples=2, seed=ctx.config.data.seed, model=state.named, run=False)
            if ctx.samples is None
            else ctx.samples.test
        )
        samples = list(held.take(_MOST_SAMPLES).samples())
        limit = max(int(largest * _BESIDE), _SEGMENT_BYTES)
        found = compare_segments(
            state.named, model, samples, limit=limit, agreement=agreement, threads=ctx.config.verify.threads,
            progress=ctx.progress,
        )  # fmt: skip
    except OnnxqError as error:
        if ctx.samples is not None:
            raise
        # Made-up inputs need not fit.
        text = f"not checked against the float model, which made-up inputs do not fit: {error.subject}: {error.cause}"
        return ModelCheck((), 0, (Caution("W127", text),))
    rows = sorted((row for one in found for row in _list_rows(one)), key=lambda row: min(row.sqnr_db))
    return ModelCheck(tuple(rows[:_SHOWN]), len(samples), segments=len(found), choices=agreement.results())


def _list_rows(found: SegmentErrors) -> list[OutputCheck]:
    return [
        OutputCheck(
            name=off.name,
            sqnr_db=(off.sqnr_db, on.sqnr_db),
            whole_db=(off.whole_db, on.whole_db),
            parts=(off.part, on.part),
            cosine=(off.cosine, on.cosine),
            agreement_db=agree.sqnr_db,
        )
        for off, on, agree in zip(found.off.results(), found.on.results(), found.agree.results(), strict=True)
    ]
