"""OpenVINO as an engine: its plugin for x86 CPUs; the library loads at use, in child processes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType

from onnxq.backends import engine
from onnxq.backends.openvino.kernels import KERNELS, read_kernels
from onnxq.backends.serving import serve_model, time_in_child
from onnxq.graph import ModelLike
from onnxq.runtime import summarize_rounds
from onnxq.sites import EngineOptions, JsonObject, Names


class OpenVinoEngine(engine.Engine):
    """OpenVINO on the CPU of this machine."""

    name = "openvino"
    title = family = "OpenVINO"
    place = "for this CPU"
    module = "openvino"
    packages: Names = ("openvino",)
    install = "pip install 'onnxq[openvino]'"
    any_size = True
    judges = True
    saturates = True
    words = engine.KernelWords(
        products=("convolution", "deconvolution", "fullyconnected", "matmul", "lstm", "gru", "rnn"),
        pools=("pooling", "reduce"),
        shifts=True,
    )
    # The marked model: nodes have numbers for names, so that it is not for people.
    saved = MappingProxyType(
        {engine.LOG: "build.log", KERNELS: KERNELS, engine.ENGINE: "model.marked.onnx"}
    )
    # On CPUs with AMX the plugin would compute in bfloat16 what stays float.
    options: EngineOptions = MappingProxyType({"INFERENCE_PRECISION_HINT": "f32"})

    def build(self, job: engine.Job, folder: Path) -> engine.BuildResult:
        """Compile the model; its kernels are listed."""
        from onnxq.backends.openvino.build import build_folder

        return build_folder(job, folder)

    def read_kernels(self, model: ModelLike, folder: Path) -> engine.Kernels:
        """The layers of the runtime graph."""
        return read_kernels(folder)

    def explain_data(self, dtype: str) -> str:
        """Signed data with a zero point are dequantized in front of a product."""
        return (
            "OpenVINO reads int8 data without a zero point, and uint8 with one"
            if dtype == "int8"
            else ""
        )

    def open_runner(
        self, name: str, model: ModelLike, job: engine.Job, folder: Path
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
        from onnxq.backends.openvino.build import answer_built, time_built

        return time_built(job, folder) if "engines" in job else answer_built(job, folder)
