"""The QNN execution provider in the child process: compile a model, and answer samples with the compiled one.

The provider is a plugin of ONNX Runtime. Qualcomm's library for x86 compiles for every chip and emulates the HTP that
runs the result; all that it prints goes into the log.
"""

import os
import re
import time
from pathlib import Path
from typing import Any

import onnx

from onnxq.backends.engine import ENGINE, LOG, MODEL, BuildResult, BuildState, Job
from onnxq.backends.qnn import kernels
from onnxq.backends.serving import Answer, answer_samples
from onnxq.graph import fix_sizes
from onnxq.graph.scopes import has_bodies
from onnxq.runtime.plugins import find_plugin_device, open_plugin_session
from onnxq.sites import EngineOptions, JsonObject

PROVIDER = "QNNExecutionProvider"
_NODE = re.compile(r"[Nn]ode:? ?[`'\"]([^`'\"]+)[`'\"]")
# The library goes on with the chip that it takes by default.
_UNKNOWN_CHIP = re.compile(r"(Unrecognized soc_model|Invalid HTP architecture).*")
_PREFIX = re.compile(r"^\[ONNXRuntimeError\] : -?\d+ : [A-Z_]+ : ")


def compile_folder(job: Job, folder: Path) -> BuildResult:
    """Compile the model in `folder` to a model of the provider's own nodes, and keep its log and record there."""
    try:
        import onnxruntime_qnn  # noqa: F401
    except ImportError as error:
        return BuildResult(state=BuildState.MISSING, reason=f"{error}; it needs {kernels.NEEDS}")
    with open(folder / LOG, "ab") as sink:
        for stream in (1, 2):
            os.dup2(sink.fileno(), stream)
    start = time.perf_counter()
    try:
        device = _find_device()
    except Exception as error:  # ONNX Runtime's own kinds have no common base
        return BuildResult(state=BuildState.UNABLE, reason=_clean(error))
    proto = onnx.load(folder / MODEL, load_external_data=False)
    # The provider takes no node whose shapes are not known.
    if job.shapes:
        proto = fix_sizes(proto, {name: profile[0] for name, profile in job.shapes.items()})
        onnx.save(proto, folder / MODEL)
    # The provider takes a path without an ending for a folder.
    compiled = folder / "compiled.onnx"
    reason = ""
    try:
        _compile(device, job.options, proto, folder, compiled)
    except Exception as error:
        reason = _clean(error)
    if compiled.exists():
        compiled.rename(folder / ENGINE)
    # Without colours, and for people.
    (folder / LOG).write_text("\n".join(kernels.read_log(folder)), encoding="utf-8")
    result = _judge_build(folder, reason)
    return BuildResult(**{**vars(result), "seconds": time.perf_counter() - start})


def _judge_build(folder: Path, reason: str) -> BuildResult:
    """How a build ended. reason: the words of ONNX Runtime where it gave no session."""
    lines = kernels.read_log(folder)
    chip = next((found[0] for line in lines if (found := _UNKNOWN_CHIP.search(line))), "")
    if chip:
        return BuildResult(state=BuildState.NO_CAPABILITY, reason=chip)
    # Where the library fails before it sees a node, ONNX Runtime goes on without it and says so in the log alone.
    if not reason and not (folder / kernels.TRACE).exists():
        reason = next(
            (
                line.partition("] ")[2]
                for line in lines
                if "rror:" in line or "[E:onnxruntime" in line
            ),
            "the provider left no record of its graphs",
        )
    if reason:
        refused = {found[1]: found for line in lines if (found := kernels.REFUSED.search(line))}
        blamed = _NODE.search(reason)
        name = blamed[1] if blamed else next(iter(reversed(refused)), "")
        # ONNX Runtime says what follows, and the validator why.
        reason = kernels.describe_refusal(refused[name]) if name in refused else reason
        node = kernels.NodeNames(onnx.load(folder / MODEL, load_external_data=False)).find_node(
            name
        )
        return BuildResult(
            state=BuildState.FAILED, reason=reason, node=node, fix=kernels.find_fix(reason)
        )
    # A model of which no node runs on the NPU has no compiled form: it stays as it is.
    if not (folder / ENGINE).exists():
        (folder / ENGINE).write_bytes((folder / MODEL).read_bytes())
    return BuildResult(state=BuildState.BUILT)


def _clean(error: Exception) -> str:
    return " ".join(_PREFIX.sub("", str(error)).split())


def _find_device() -> Any:
    """The HTP: the NPU of this machine, or its emulator."""
    import onnxruntime_qnn

    return find_plugin_device(PROVIDER, onnxruntime_qnn.get_library_path())


def _compile(
    device: Any, settings: EngineOptions, proto: onnx.ModelProto, folder: Path, compiled: Path
) -> None:
    """Have the provider write the compiled model; the graphs and the record of its nodes go to the folder."""
    (folder / kernels.GRAPHS).mkdir(exist_ok=True)
    records = {
        "dump_json_qnn_graph": "1",
        "json_qnn_graph_dir": str(folder / kernels.GRAPHS),
        "enable_framework_op_trace": "1",
        "framework_op_trace_dir": str(folder),
    }
    entries = {}
    # Of a model with If, Loop or Scan ONNX Runtime 1.32 writes no compiled form: it loses what their bodies read.
    if not has_bodies(proto.graph):
        records["enable_htp_prepare_only"] = "1"
        entries = {
            "ep.context_enable": "1",
            "ep.context_file_path": str(compiled),
            "ep.context_embed_mode": "1",
        }
    open_plugin_session(device, folder / MODEL, {**_find_backend(), **settings, **records}, entries)


def _find_backend() -> dict[str, str]:
    """The setting by which the provider takes the HTP, and not the GPU or the CPU."""
    import onnxruntime_qnn

    return {"backend_path": onnxruntime_qnn.get_qnn_htp_path()}


def answer_compiled(job: JsonObject, folder: Path) -> JsonObject:
    """Answer samples with the compiled model in `folder`."""

    def open_model() -> Answer:
        session = open_plugin_session(
            _find_device(), folder / ENGINE, {**_find_backend(), **job["options"]}
        )
        names = [value.name for value in session.get_outputs()]
        return lambda feeds: dict(zip(names, session.run(names, dict(feeds)), strict=True))

    answer_samples(open_model, _clean, folder)
    return {}
