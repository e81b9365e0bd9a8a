"""The emulator's answers: one size alone, and the integers of quantized tensors beside the outputs."""

from contextlib import AbstractContextManager
from pathlib import Path

from onnxq.backends.engine import Engine, Job
from onnxq.backends.serving import ServedRunner, serve_model
from onnxq.errors import ModelError
from onnxq.graph import QUANTIZE, ModelLike, get_index
from onnxq.runtime import tap_tensors
from onnxq.sites import TensorId


def emulate(
    engine: Engine, name: str, model: ModelLike, job: Job, folder: Path
) -> AbstractContextManager[ServedRunner]:
    """Compile a model and open its emulator; with `debug_tensors` integers of quantized tensors are outputs, too.

    Raises ModelError, naming the node, where the model is not compiled, and for samples of several sizes.
    """
    for value, sizes in job.shapes.items():
        if len(set(sizes)) > 1:
            listed = ", ".join(dict.fromkeys("x".join(map(str, size)) for size in sizes))
            cause = f"a compiled model takes one size, and samples have {listed}"
            raise ModelError(f"input {value}", cause, "give samples of one size", code="Q115")
    tapped = _tap_quantized(model) if job.debug_tensors else model
    return serve_model(engine, name, tapped, job, folder)


def _tap_quantized(model: ModelLike) -> ModelLike:
    """The model with the integers of quantized activations as outputs: fusions need them anyway, and stay."""
    index = get_index(model)
    makers = (node for node in index.nodes if node.op_type == QUANTIZE and not node.scope)
    wanted = [node.result for node in makers if not index.is_constant(TensorId(node.inputs[0]))]
    return tap_tensors(model, wanted).proto
