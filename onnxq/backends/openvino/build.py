"""OpenVINO in the child process: compile a model and list its kernels, answer samples, time models side by side.

OpenVINO cuts nodes apart and fuses them, and each of its kernels has the names of all that went into it. So nodes get
names that can be told again whatever is put around them.
"""

import json
import re
import time
from pathlib import Path
from typing import Any

import onnx

from onnxq.backends.engine import ENGINE, LOG, MODEL, BuildResult, BuildState, Job, Profile
from onnxq.backends.openvino.kernels import CONSTANT, KERNELS, MARK, mark_name
from onnxq.backends.serving import FEEDS, Answer, answer_samples
from onnxq.graph.scopes import walk_graphs
from onnxq.runtime import detect_cpu
from onnxq.runtime.exchange import read_values
from onnxq.runtime.timing import Block, count_block_runs, measure_rounds, time_runs
from onnxq.sites import EngineOptions, JsonObject

_UNSUPPORTED = re.compile(
    r"(?:No conversion rule found for|does not support the following ONNX) operations: ([\w.:, -]+)"
)
_FIX = "write the model with other operators, or run it with another engine"
# Characters of a message: OpenVINO's go on with its own stack.
_MESSAGE = 400


def build_folder(job: Job, folder: Path) -> BuildResult:
    """Compile the model in `folder`; the marked model and the list of its kernels are left there."""
    start = time.perf_counter()
    try:
        import openvino
    except ImportError as error:
        return BuildResult(state=BuildState.MISSING, reason=str(error))
    # Whole, since the marked file is opened from other folders, too.
    model = onnx.load(folder / MODEL)
    marked = [node for _, graph in walk_graphs(model.graph) for node in graph.node]
    names = [node.name for node in marked]
    for k, node in enumerate(marked):
        node.name = mark_name(k)
    onnx.save(model, folder / ENGINE)
    try:
        compiled = _compile(openvino, folder / ENGINE, job.options, job.shapes)
        rows = [_describe_layer(layer) for layer in compiled.get_runtime_model().get_ordered_ops()]
    except Exception as error:  # its kinds have no common base
        return _explain_failure(error, names, marked)
    # A node that makes an output loses its name to it.
    made = {name: k for k, node in enumerate(marked) for name in node.output}
    outputs = {value.name: made[value.name] for value in model.graph.output if value.name in made}
    text = json.dumps({"nodes": names, "outputs": outputs, "layers": rows}, indent=1)
    (folder / KERNELS).write_text(text, encoding="utf-8")
    (folder / LOG).write_text(f"{openvino.__version__}\n", encoding="utf-8")
    return BuildResult(state=BuildState.BUILT, seconds=time.perf_counter() - start)


def _compile(
    openvino: Any, path: Path, options: EngineOptions, shapes: Profile | None = None
) -> Any:
    core = openvino.Core()
    model = core.read_model(path)
    if shapes:
        # The sizes between the smallest and the largest of each axis.
        sizes = {
            name: [openvino.Dimension(min(axis), max(axis)) for axis in zip(*profile, strict=True)]
            for name, profile in shapes.items()
        }
        model.reshape({name: openvino.PartialShape(axes) for name, axes in sizes.items()})
    # Compiled for one thread, kernels are those of the times that are reported.
    return core.compile_model(model, "CPU", {"INFERENCE_NUM_THREADS": 1, **options})


def _explain_failure(
    error: Exception, names: list[str], nodes: list[onnx.NodeProto]
) -> BuildResult:
    """The refusal in OpenVINO's words, with the node that it blames."""
    text = str(error)
    unsupported = _UNSUPPORTED.search(text)
    if unsupported:
        op = re.split(r"[.:]", unsupported[1].split(",")[0].strip())[-1].partition("-")[0]
        node = next(
            (name for name, node in zip(names, nodes, strict=True) if node.op_type == op), ""
        )
        reason = f"OpenVINO has no {op}"
        return BuildResult(state=BuildState.REFUSED, reason=reason, node=node, fix=_FIX)
    blamed = MARK.search(text)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # The last lines say what was wrong, those before them where in its sources.
    reason = MARK.sub(lambda found: repr(names[int(found[1])]), " ".join(lines[-2:]))[:_MESSAGE]
    return BuildResult(
        state=BuildState.REFUSED,
        reason=reason,
        node=names[int(blamed[1])] if blamed else "",
        fix=_FIX,
    )


def _describe_layer(layer: Any) -> JsonObject:
    """A layer as it runs, with the types of what it reads and writes."""
    return {
        "name": layer.get_friendly_name(),
        "kind": _read_info(layer, "layerType"),
        "primitive": _read_info(layer, "primitiveType"),
        "sources": _read_info(layer, "originalLayersNames"),
        "inputs": [_describe_tensor(value) for value in layer.input_values()],
        "outputs": [_describe_tensor(value) for value in layer.outputs()],
    }


def _read_info(layer: Any, key: str) -> str:
    info = layer.get_rt_info()
    return str(info[key].astype(str)) if key in info else ""


def _describe_tensor(value: Any) -> JsonObject:
    maker = value.get_node()
    port = value.get_index()
    types, layouts = (
        _read_info(maker, key).split(",") for key in ("outputPrecisions", "outputLayouts")
    )
    shape = value.get_partial_shape()
    return {
        "name": maker.get_friendly_name(),
        # One word stands for all ports where they are of one type.
        "dtype": types[min(port, len(types) - 1)],
        "layout": layouts[min(port, len(layouts) - 1)],
        "shape": [dim.get_length() if dim.is_static else -1 for dim in shape]
        if shape.rank.is_static
        else [],
        "constant": _read_info(maker, "layerType") == CONSTANT,
    }


def answer_built(job: JsonObject, folder: Path) -> JsonObject:
    """Answer samples with the model that was built in `folder`."""

    def open_model() -> Answer:
        import openvino

        compiled = _compile(openvino, folder / ENGINE, job["options"])
        # An output that repeats a tensor shares its names with it.
        names = [value.get_names() for value in compiled.outputs]
        return lambda feeds: {
            name: value
            for shared, value in zip(names, compiled(dict(feeds)).values(), strict=True)
            for name in sorted(shared)
        }

    answer_samples(open_model, _shorten_message, folder)
    return {}


def _shorten_message(error: Exception) -> str:
    return " ".join(str(error).split())[:_MESSAGE]


def time_built(job: JsonObject, folder: Path) -> JsonObject:
    """Time the models of a job side by side, each compiled for the sizes of its feeds."""
    import openvino

    # All in one process, so that a busy moment hits all of them alike.
    blocks = {}
    reasons = {}
    options = {**job["options"], "INFERENCE_NUM_THREADS": job["threads"]}
    feeds = read_values(folder / FEEDS)
    for name, path in job["engines"].items():
        try:
            shapes = {key: (value.shape,) for key, value in feeds[name].items()}
            request = _compile(openvino, Path(path), options, shapes).create_infer_request()
            blocks[name] = _make_block(request, feeds[name])
        except Exception as error:  # the others are timed
            reasons[name] = _shorten_message(error)
    times = measure_rounds(blocks, rounds=job["rounds"], seconds=job["seconds"], precision=0.0)
    return {"device": detect_cpu(), "failed": "", "times": times, "reasons": reasons}


def _make_block(request: Any, feeds: Any) -> Block:
    """Runs of one model that last long enough to be measured. request: compiled for the sizes of its feeds."""

    def run() -> object:
        # Copies of inputs and outputs are none of the network's time.
        return request.infer(feeds, share_inputs=True, share_outputs=True)

    count = count_block_runs(lambda: time_runs(run))
    return lambda: time_runs(run, count)
