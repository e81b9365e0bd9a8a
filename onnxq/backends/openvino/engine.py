"""OpenVINO as an engine: its plugin for x86 CPUs; the library loads at use, in child processes.

There a model is compiled and its runtime graph listed, samples are answered, and models timed side by side. OpenVINO
cuts nodes apart and fuses them, and each of its kernels has the names of all that went into it. So nodes get names that
can be told again whatever is put around them.
"""

import json
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import onnx

from onnxq.backends import engine
from onnxq.backends.base import WEIGHTED_OPS
from onnxq.backends.engine import ENGINE, LOG, MODEL, BuildResult, BuildState, Job, Kernel, Tensor
from onnxq.backends.serving import FEEDS, Answer, answer_samples, serve_model, time_in_child
from onnxq.graph import Graph, ModelLike, get_index, save_model, walk_graphs
from onnxq.runtime import detect_cpu, summarize_rounds
from onnxq.runtime.timing import Block, count_block_runs, measure_rounds, time_runs
from onnxq.sites import EngineOptions, JsonObject, Names, drop_repeats
from onnxq.workers import read_value

# The list of a build's layers, with the model's own names.
_KERNELS = "kernels.json"
# A node's name in the model that is compiled: a number that no suffix of OpenVINO's can change.
_MARK = re.compile(r"node\[(\d+)\]")
_MOVES = (
    "Reorder",
    "Reshape",
    "Transpose",
    "Convert",
    "Broadcast",
    "Split",
    "StridedSlice",
    "MemoryInput",
)
# Of neighbours that are computed in one; and our word where these are products of integers, with their pairs inside.
_CHAIN = "Subgraph"
_INTEGER_CHAIN = f"{_CHAIN} int8"
_CONSTANT = "Const"
# Beside constants, the layers of the model's ends.
_ENDS = ("Input", "Output", _CONSTANT)
_TYPES = {
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "u8": "uint8",
    "i8": "int8",
    "i4": "int4",
    "u4": "uint4",
    "i32": "int32",
    "u32": "uint32",
    "i64": "int64",
    "boolean": "bool",
}
_UNSUPPORTED = re.compile(
    r"(?:No conversion rule found for|does not support the following ONNX) operations: ([\w.:, -]+)"
)
_FIX = "write the model with other operators, or run it with another engine"
# Characters of a message: OpenVINO's go on with its own stack.
_MESSAGE = 400


class OpenVinoEngine(engine.Engine):
    """OpenVINO on the CPU of this machine."""

    name = "openvino"
    title = family = "OpenVINO"
    place = "for this CPU"
    module = "openvino"
    packages: Names = ("openvino",)
    install = 'pip install "onnxq[openvino]"'
    any_size = True
    judges = True
    saturates = True
    words = engine.KernelWords(
        products=("convolution", "deconvolution", "fullyconnected", "matmul", "lstm", "gru", "rnn"),
        pools=("pooling", "reduce"),
        shifts=True,
        int8=frozenset({_INTEGER_CHAIN}),
    )
    # The marked model: nodes have numbers for names, so that it is not for people.
    saved = MappingProxyType({LOG: "build.log", _KERNELS: _KERNELS, ENGINE: "model.marked.onnx"})
    # On CPUs with AMX the plugin would compute in bfloat16 what stays float.
    options: EngineOptions = MappingProxyType({"INFERENCE_PRECISION_HINT": "f32"})

    def build(self, job: Job, folder: Path) -> BuildResult:
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
            node.name = f"node[{k}]"
        save_model(model, folder / ENGINE, overwrite=True)
        try:
            compiled = _compile(openvino, folder / ENGINE, job.options, job.shapes)
            rows = [
                _describe_layer(layer) for layer in compiled.get_runtime_model().get_ordered_ops()
            ]
        except Exception as error:  # its kinds have no common base
            return _explain_failure(error, names, marked)
        # A node that makes an output loses its name to it.
        made = {name: k for k, node in enumerate(marked) for name in node.output}
        outputs = {
            value.name: made[value.name] for value in model.graph.output if value.name in made
        }
        text = json.dumps({"nodes": names, "outputs": outputs, "layers": rows}, indent=1)
        (folder / _KERNELS).write_text(text, encoding="utf-8")
        (folder / LOG).write_text(f"{openvino.__version__}\n", encoding="utf-8")
        return BuildResult(state=BuildState.BUILT, seconds=time.perf_counter() - start)

    def read_kernels(self, model: ModelLike, folder: Path) -> engine.Kernels:
        """The layers of the runtime graph in the order they run, constants and ends aside."""
        listed = json.loads((folder / _KERNELS).read_bytes())
        layers = (row for row in listed["layers"] if row["kind"] not in _ENDS)
        index = get_index(model)
        return tuple(
            _tell_chain(_read_layer(row, listed["nodes"], listed["outputs"]), index)
            for row in layers
        )

    def explain_data(self, dtype: str) -> str:
        """Signed data with a zero point are dequantized in front of a product."""
        return (
            "OpenVINO reads int8 data without a zero point, and uint8 with one"
            if dtype == "int8"
            else ""
        )

    def open_runner(
        self, name: str, model: ModelLike, job: Job, folder: Path
    ) -> AbstractContextManager[engine.Runner]:
        """Compile the model and run it, in a process of its own."""
        return serve_model(self, name, model, job, folder)

    def time_models(
        self, models: Mapping[str, engine.TimedModel], timing: engine.Timing
    ) -> engine.EngineTimes:
        """Time models in one child process, in as many threads as asked for."""
        result = time_in_child(self, models, timing)
        times = {
            name: summarize_rounds(rounds, timing.threads)
            for name, rounds in result["times"].items()
        }
        return engine.EngineTimes(device=result["device"], eager=times, reasons=result["reasons"])

    def run_job(self, job: JsonObject, folder: Path) -> JsonObject:
        """Time the models of a job, or answer samples."""
        return _time_built(job, folder) if "engines" in job else _answer_built(job, folder)


def _compile(
    openvino: Any, path: Path, options: EngineOptions, shapes: engine.Profile | None = None
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
    blamed = _MARK.search(text)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # The last lines say what was wrong, those before them where in its sources.
    reason = _MARK.sub(lambda found: repr(names[int(found[1])]), " ".join(lines[-2:]))[:_MESSAGE]
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
    words = (_read_info(maker, key).split(",") for key in ("outputPrecisions", "outputLayouts"))
    # One word stands for all ports where they are of one type.
    dtype, layout = (each[min(port, len(each) - 1)] for each in words)
    shape = value.get_partial_shape()
    return {
        "name": maker.get_friendly_name(),
        "dtype": dtype,
        "layout": layout,
        "shape": [dim.get_length() if dim.is_static else -1 for dim in shape]
        if shape.rank.is_static
        else [],
        "constant": _read_info(maker, "layerType") == _CONSTANT,
    }


def _answer_built(job: JsonObject, folder: Path) -> JsonObject:
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


def _time_built(job: JsonObject, folder: Path) -> JsonObject:
    """Time the models of a job side by side, each as applications load it: sizes that are free stay so."""
    import openvino

    # All in one process, so that a busy moment hits all of them alike.
    blocks = {}
    reasons = {}
    options = {**job["options"], "INFERENCE_NUM_THREADS": job["threads"]}
    feeds = read_value(folder / FEEDS)
    for name, path in job["engines"].items():
        try:
            request = _compile(openvino, Path(path), options).create_infer_request()
            blocks[name] = _make_block(request, feeds[name])
        except Exception as error:  # the others are timed
            reasons[name] = _shorten_message(error)
    times = measure_rounds(blocks, rounds=job["rounds"], seconds=job["seconds"], precision=0.0)
    return {"device": detect_cpu(), "times": times, "reasons": reasons}


def _make_block(request: Any, feeds: Any) -> Block:
    """Runs of one model that last long enough to be measured."""

    def run() -> object:
        # Copies of inputs and outputs are none of the network's time.
        return request.infer(feeds, share_inputs=True, share_outputs=True)

    count = count_block_runs(lambda: time_runs(run))
    return lambda: time_runs(run, count)


def _find_nodes(sources: str, names: list[str], outputs: Mapping[str, int]) -> Iterator[str]:
    """The model's nodes among the names that went into a layer."""
    for source in sources.split(","):
        found = _MARK.search(source)
        # Parts of a node have its name and more.
        part = next(
            (
                k
                for name, k in outputs.items()
                if re.match(rf"{re.escape(name)}(?:/|_original|$)", source)
            ),
            None,
        )
        if found is not None:
            yield names[int(found[1])]
        elif part is not None:
            yield names[part]


def _read_layer(row: JsonObject, names: list[str], outputs: Mapping[str, int]) -> Kernel:
    return Kernel(
        name=_MARK.sub(lambda found: names[int(found[1])], row["name"]),
        kind=row["kind"],
        nodes=drop_repeats(_find_nodes(row["sources"], names, outputs)),
        inputs=tuple(_read_tensor(entry) for entry in row["inputs"] if not entry["constant"]),
        weights=tuple(_read_tensor(entry) for entry in row["inputs"] if entry["constant"]),
        outputs=tuple(map(_read_tensor, row["outputs"])),
        tactic=row["primitive"],
        moves=row["kind"] in _MOVES,
    )


def _tell_chain(kernel: Kernel, index: Graph) -> Kernel:
    """The kernel, under our word where it quantizes the data of each product in it: of small layers, in one thread."""
    if kernel.kind != _CHAIN:
        return kernel
    nodes = [index.find_node(name) for name in kernel.nodes]
    products = [node for node in nodes if node.op_type in WEIGHTED_OPS]
    quantizes = (index.maker(index.maker(node), 0, "QuantizeLinear") in nodes for node in products)
    return replace(kernel, kind=_INTEGER_CHAIN) if products and all(quantizes) else kernel


def _read_tensor(entry: JsonObject) -> Tensor:
    dtype = str(entry["dtype"])
    return Tensor(
        name=entry["name"],
        dtype=_TYPES.get(dtype, dtype),
        shape=tuple(entry["shape"]),
        layout=entry["layout"],
    )
