"""The command's own check of a model that no session should hold whole: a segment at a time."""

from __future__ import annotations

from onnxq.data import Dataset
from onnxq.data.synthetic import make_synthetic
from onnxq.errors import OnnxqError
from onnxq.evaluation.agreement import AgreementSums
from onnxq.evaluation.segments import compare_segments
from onnxq.evaluation.selections import find_selections
from onnxq.graph import ModelLike, get_index
from onnxq.graph.light import bare_proto
from onnxq.graph.weights import count_tensor_bytes
from onnxq.passes.base import RunContext
from onnxq.passes.state import State
from onnxq.pipeline.check import ModelCheck, make_checks
from onnxq.sites import Caution

# Bytes of weights that a segment has at least, if there are so many: fewer sessions, each of which takes time.
_SEGMENT_BYTES = 1 << 26
# Beside the largest weight, small ones go into its segment.
_BESIDE = 1.25
# Samples, of which all tensors between two segments are in memory.
_MOST_SAMPLES = 4
# Rows of the summary: the worst segments.
_SHOWN = 3


def check_segments(ctx: RunContext, state: State, model: ModelLike) -> ModelCheck:
    """Float and quantized model on a few samples, each segment on the float model's own values; the worst ones."""
    index = get_index(state.named)
    agreement = AgreementSums(find_selections(state.named))
    largest = max((count_tensor_bytes(tensor) for tensor in bare_proto(state.named).graph.initializer), default=0)
    try:
        if ctx.samples is None:
            seed = ctx.config.data.seed
            dataset: Dataset = make_synthetic(index.inputs, samples=2, seed=seed, model=state.named, run=False)
        else:
            dataset = ctx.samples.test
        samples = list(dataset.take(_MOST_SAMPLES).samples())
        segments = compare_segments(
            state.named,
            model,
            samples,
            limit=max(int(largest * _BESIDE), _SEGMENT_BYTES),
            agreement=agreement,
            threads=ctx.config.verify.threads,
            progress=ctx.progress,
        )
    except OnnxqError as error:
        if ctx.samples is not None:
            raise
        # Made-up inputs need not fit.
        text = f"not checked against the float model, which made-up inputs do not fit: {error.subject}: {error.cause}"
        return ModelCheck((), 0, (Caution("W127", text),))
    checks = [check for errors in segments for check in make_checks(errors.off, errors.on, errors.agree)]
    checks.sort(key=lambda check: min(check.sqnr_db))
    return ModelCheck(tuple(checks[:_SHOWN]), len(samples), segments=len(segments), choices=agreement.results())
