"""TensorRT and TensorRT for RTX as engines; their libraries and Polygraphy load at first use.

Engines are built in a child process (build.py), run with Polygraphy, and timed in a child process: loaded, fed, and run
between events of the GPU.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise, starmap
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from onnxq.arrays import Array, Arrays, RunValues
from onnxq.backends import engine
from onnxq.backends.building import COMPILING, demand_build
from onnxq.backends.engine import LOG, Engine, EngineTimes, Job
from onnxq.backends.serving import FEEDS, time_in_child
from onnxq.backends.trt.build import build_engine, load_plugins, make_logger
from onnxq.backends.trt.cuda import Cuda, Launch, count_gpus
from onnxq.backends.trt.kernels import INSPECTION, LAYERS, read_inspector, read_layers_message
from onnxq.errors import ConfigError, MissingDependencyError, ModelError, VerificationError
from onnxq.graph import LAYOUT_OPS, Dims, GraphIndex, ModelLike, NodeRef
from onnxq.kernels.driver import DriverError
from onnxq.runtime import Feeds, summarize_rounds
from onnxq.runtime.timing import count_block_runs, measure_rounds
from onnxq.sites import EngineOptions, JsonObject, Names, Refusal
from onnxq.workers import read_value

# Compute capability that is built for where none is asked for: GeForce 30.
CAPABILITY = "8.6"
# That of the GPU in this machine.
CURRENT = "current"
_LINKS = "links"
# Int8 kernels need 8.0 or more.
_TURING = (7, 5)
# Nodes behind a product in which TensorRT looks for work to do on the weight beforehand, as far as was seen.
_NEAR = 4
# Operators that only move data: a quantization is carried over them.
_MOVES = LAYOUT_OPS | {"Slice", "Expand", "Add"}
_CUT_UP = "its result is cut up, which TensorRT does to the weight instead, in float: give its result a pair"
POLYGRAPHY = 'pip install "onnxq[polygraphy]"'
# Of its errors: the name of its runs.
_SUBJECT = "trt"
# Characters of a message of Polygraphy's: it goes on for lines, and only the first ones name the cause.
_MESSAGE = 500
# Seconds of work before anything is timed: a GPU that idles runs at a lower clock.
_WARM_UP = 0.5
# How an engine runs: launched kernel by kernel, or as one captured graph.
EAGER = "eager"
GRAPH = "graph"


class TrtEngine(Engine):
    """TensorRT, which builds for the GPU of this machine."""

    name = "tensorrt"
    title = family = "TensorRT"
    place = "for the GPU of this machine"
    module = "tensorrt"
    packages: Names = ("tensorrt", "tensorrt-cu13", "tensorrt-cu12")
    install = 'pip install "onnxq[trt]"'
    unable_fix = (
        "run it where there is one, or use `engine='tensorrt-rtx'`, which builds without a GPU"
    )
    takes: Names = ("plugin",)
    shows_inner = True
    # Parts of kinds in TensorRT-RTX's words, then in TensorRT's. Others (kgen, reformat, pointwise) compute bias,
    # activation and quantization around it. Fused attention is listed as a generated kernel; its name tells it.
    words = engine.KernelWords(
        products=(
            "correlation",
            "gemm",
            "deconv",
            "runtime_fusion",
            "convolution",
            "caskflattenconvolution",
            "fusion",
            "fully_connected",
            "matrix",
            "mha",
            "attention",
            "conv",
        ),
        pools=("maxpool", "avgpool", "pooling"),
        attention="_mha",
        dequantizes="runtime_fusion",
    )
    no_kernel = (
        "ConvTranspose",
        "AveragePool",
        "LpPool",
        "GlobalAveragePool",
        "LSTM",
        "GRU",
        "RNN",
    )
    purposes = MappingProxyType(
        {
            "matmul-qkv": "it keeps the product in front of it in int8, whose weight TensorRT would else cut up in "
            "float: its own integers are read by none, and cost rounding only"
        }
    )
    saved = MappingProxyType(
        {LOG: "build.log", LAYERS: LAYERS, INSPECTION: LAYERS, engine.ENGINE: "model.engine"}
    )

    def build(self, job: Job, folder: Path) -> engine.BuildResult:
        """Build the model in `folder`, and write the engine and the list of its kernels there."""
        return build_engine(self, job, folder)

    def read_kernels(self, model: ModelLike, folder: Path) -> engine.Kernels:
        """The kernels that the inspector or the log lists."""
        inspection = folder / INSPECTION
        if inspection.exists():
            return read_inspector(inspection.read_text(encoding="utf-8"))
        return read_layers_message((folder / LAYERS).read_text(encoding="utf-8"))

    def explain_capability(self, capability: engine.ComputeCapability) -> str:
        """Turing has none."""
        return "int8 kernels need compute capability 8.0 or more" if capability == _TURING else ""

    def explain_operand(self, node: NodeRef, scale: Dims | None, role: str) -> str:
        """A scale of shape [1] counts as one for each channel."""
        if node.op_type != "Conv" or scale != (1,):
            return ""
        return f"the scale of its {role} has shape [1], which TensorRT takes for one scale per channel: make it []"

    def explain_result(self, index: GraphIndex, node: NodeRef) -> str:
        """TensorRT slices a product's weight instead of its result, and dequantizes the slices before it runs."""
        for _ in range(_NEAR):
            readers = index.readers(node.result)
            if any(reader.op_type in ("Slice", "Split") for reader in readers):
                return _CUT_UP
            if len(readers) != 1 or readers[0].op_type not in _MOVES:
                return ""
            node = readers[0]
        return ""

    def find_obstacle(self) -> Refusal | None:
        """Why an engine cannot be run on this machine."""
        if not self.installed:
            cause = "TensorRT is not installed"
            where = 'on a machine with an NVIDIA GPU ("onnxq[trt-rtx]" for TensorRT for RTX)'
            fix = f'pip install "onnxq[trt]" "onnxq[polygraphy]" {where}'
        elif find_spec("polygraphy") is None:
            cause = "Polygraphy, which runs its engines, is not installed"
            fix = POLYGRAPHY
        elif not count_gpus():
            missing = "there is no NVIDIA GPU (or no driver) to run an engine on"
            cause = f"{self.module} is installed, but {missing}"
            fix = "run `onnxq diff` with `out=…` on a machine with one, and take its folder as `load=…` here"
        else:
            return None
        return Refusal(self.name, cause, fix, code="R111")

    @contextmanager
    def open_runner(
        self, name: str, model: ModelLike, job: Job, folder: Path
    ) -> Iterator[engine.Runner]:
        """Build an engine for this machine's GPU and run it with Polygraphy."""
        with TrtRunner(self, name, build_trt(self, model, job, folder), job.plugins) as runner:
            yield runner

    def demand_device(self, subject: str) -> None:
        """Timing takes the GPU and no Polygraphy."""
        if self.installed and count_gpus():
            return
        cause = (
            "this machine has no NVIDIA GPU, or no driver"
            if self.installed
            else "TensorRT is not installed"
        )
        fix = f"take `placement='rules'`, or a machine with one and {TrtEngine.install}"
        raise VerificationError(
            subject, f"TensorRT's engines are timed on a GPU: {cause}", fix, code="Q708"
        )

    def time_models(
        self, models: Mapping[str, engine.TimedModel], timing: engine.Timing
    ) -> EngineTimes:
        """Time engines on this machine's GPU, each launched kernel by kernel and as a CUDA graph."""
        result = time_in_child(self, models, timing)
        times = result["times"]
        eager, graph = (
            {
                name: summarize_rounds(times[key])
                for name in models
                if (key := f"{name} {mode}") in times
            }
            for mode in (EAGER, GRAPH)
        )
        return EngineTimes(
            device=result["device"], eager=eager, graph=graph, reasons=result["reasons"]
        )

    def run_job(self, job: JsonObject, folder: Path) -> JsonObject:
        """Time the engines of a job side by side, each launched kernel by kernel and as a graph.

        job: as `time_in_child` writes it. Returns the GPU's name, the seconds of each run by round, for every engine
        and way of running it that works, and why the others do not.
        """
        try:
            cuda = Cuda()
        except DriverError as error:
            return {"device": "", "failed": str(error)}
        library = import_module(self.module)
        with open(folder / LOG, "w", encoding="utf-8") as sink:
            logger = make_logger(library, sink)
            if missing := load_plugins(library, logger, job["plugins"]):
                return {"device": cuda.name, "failed": missing}
            blocks = {}
            reasons = {}
            feeds = read_value(folder / FEEDS)
            for name, path in job["engines"].items():
                try:
                    loaded = LoadedEngine(library, logger, cuda, Path(path), feeds[name])
                    blocks[f"{name} {EAGER}"] = loaded.make_block(loaded.enqueue)
                except Exception as error:  # the library's own kinds have no common base; the other engines are timed
                    told = next(iter(logger.errors[-1:]), "")
                    reasons[name] = f"{type(error).__name__}: {error}" + (
                        f" ({told})" if told else ""
                    )
                    continue
                try:
                    blocks[f"{name} {GRAPH}"] = loaded.make_block(cuda.capture(loaded.enqueue))
                except Exception as error:  # work that waits for the CPU cannot be captured
                    reasons[name] = f"no CUDA graph: {type(error).__name__}: {error}"
            times = measure_rounds(
                blocks, rounds=job["rounds"], seconds=job["seconds"], precision=0.0
            )
        return {"device": cuda.name, "times": times, "reasons": reasons}


class RtxEngine(TrtEngine):
    """TensorRT for RTX, which builds for any GPU without one."""

    name = "tensorrt-rtx"
    title = "TensorRT for RTX"
    place = "without a GPU"
    module = "tensorrt_rtx"
    packages: Names = ("tensorrt-rtx",)
    install = 'pip install "onnxq[trt-rtx]"'
    takes: Names = ("plugin", "compute_capability")
    builds_ahead = True

    def read_capability(self, text: str | None) -> engine.ComputeCapability:
        """(8, 6) for "8.6", the default; () for the GPU of this machine. Raises ConfigError for other text."""
        if text == CURRENT:
            return ()
        # 8.6, 86, sm_86; of sm_120 the last digit is the minor number.
        found = re.fullmatch(r"(?:sm_?)?(\d+)\.?(\d)", (text or CAPABILITY).lower())
        if found is None:
            raise ConfigError(
                f"compute capability {text!r}", "is none", "write it as 8.6", code="Q304"
            )
        return int(found[1]), int(found[2])

    def prepare_environment(self, job: Job, folder: Path) -> EngineOptions:
        """The environment in which the library finds itself when it meets a plugin."""
        home = find_spec("tensorrt_rtx_libs") if job.plugins and sys.platform == "linux" else None
        if home is None:
            return {}
        # The parser loads libtensorrt_rtx.so by this name when it meets a plugin, and ends the process where it is not
        # found; the wheel holds it under its versioned name only.
        (folder / _LINKS).mkdir(exist_ok=True)
        for library in Path(next(iter(home.submodule_search_locations or ()))).glob(
            "libtensorrt_rtx.so.*"
        ):
            link = folder / _LINKS / "libtensorrt_rtx.so"
            link.unlink(missing_ok=True)
            link.symlink_to(library)
        paths = (str(folder / _LINKS), os.environ.get("LD_LIBRARY_PATH"))
        return {"LD_LIBRARY_PATH": os.pathsep.join(filter(None, paths))}

    def find_local(self) -> Engine:
        """TensorRT where there are a GPU and the library."""
        usual = TrtEngine()
        return usual if usual.installed and count_gpus() else self

    def choose_device(self, capability: str | None) -> tuple[str | None, engine.Untimed | None]:
        """Builds for another GPU cannot be timed, and none can without one."""
        if capability is not None:
            return capability, engine.Untimed.OTHER_GPU
        return (CURRENT, None) if count_gpus() else (None, engine.Untimed.NO_GPU)


def build_trt(engine: Engine, proto: ModelLike, job: Job, folder: Path) -> Path:
    """Build an engine for this machine's GPU, or another's capability, in a child process. Returns its path.

    Raises ModelError with TensorRT's own words when it gives none, ConfigError for a plugin that it cannot load.
    """
    # Without TF32: differences of kernels are looked for, not of float formats.
    return demand_build(
        engine, proto, replace(job, tf32=False), folder, subject=_SUBJECT, timeout=COMPILING
    )


def load_polygraphy(module: str) -> Any:
    """A module of Polygraphy. Raises MissingDependencyError with the install line."""
    try:
        return import_module(f"polygraphy.{module}")
    except ImportError as error:
        raise MissingDependencyError(
            "polygraphy", f"cannot be imported ({error})", POLYGRAPHY, code="Q804"
        ) from error


@contextmanager
def translate_errors() -> Iterator[None]:
    """Nothing that Polygraphy logs is shown; its errors become ModelErrors with its words."""
    logger = load_polygraphy("logger").G_LOGGER
    own = load_polygraphy("exception").PolygraphyException
    with logger.verbosity(logger.CRITICAL + 1):
        try:
            yield
        except (own, OSError) as error:  # OSError: a CUDA library that cannot be loaded
            message = " ".join(str(error).split())
            raise ModelError("Polygraphy", message[:_MESSAGE] or "failed", code="Q115") from error
        except (AttributeError, TypeError, RuntimeError) as error:
            # Polygraphy and TensorRT grow apart with their releases; a mismatch shows as one of these.
            fix = "install releases of polygraphy and TensorRT that belong together"
            raise ModelError(
                _SUBJECT, f"{type(error).__name__}: {error}", fix, code="Q115"
            ) from error


class TrtRunner:
    """A Runner of a built engine: a context manager. Tensors that survived fusion come out with its outputs."""

    def __init__(self, engine: Engine, name: str, path: Path, plugins: Sequence[str] = ()) -> None:
        self.name = name
        self.seconds = 0.0
        # In this process, where the engine runs: NVIDIA's plugins, of which TensorRT for RTX has none, and these. Those
        # that are there already stay.
        if engine.installed and (plugins or not engine.builds_ahead):
            library = import_module(engine.module)
            with open(os.devnull, "w", encoding="utf-8") as sink:
                load_plugins(library, make_logger(library, sink), plugins)
        # Polygraphy decides once which TensorRT it uses, when its TensorRT backend is first imported.
        load_polygraphy("config").USE_TENSORRT_RTX = engine.builds_ahead
        with translate_errors():
            backend = load_polygraphy("backend.trt")
            self._runner = backend.TrtRunner(backend.EngineFromPath(str(path)), name=name)
        self._open = ExitStack()

    def __enter__(self) -> TrtRunner:
        with translate_errors():
            self._open.enter_context(self._runner)
        return self

    def __exit__(self, *exception: object) -> None:
        with translate_errors():
            self._open.close()

    def infer(self, feeds: Feeds) -> RunValues:
        """One sample: arrays by name. They may be the runner's own buffers, which last until its next run."""
        with translate_errors():
            # Dataset checks the feeds, with better messages.
            values = dict(self._runner.infer(dict(feeds), check_inputs=False))
            self.seconds = self._runner.last_inference_time()
            return values


class LoadedEngine:
    """An engine with its inputs and outputs on the GPU."""

    def __init__(self, library: Any, logger: Any, cuda: Cuda, path: Path, feeds: Arrays) -> None:
        self._cuda = cuda
        self._runtime = library.Runtime(logger)
        self._engine = self._runtime.deserialize_cuda_engine(path.read_bytes())
        if self._engine is None:
            raise RuntimeError("the engine cannot be loaded")
        self._context = self._engine.create_execution_context()
        # Buffers of inputs that the CPU reads must live as long as the context.
        self._held: list[Array] = []
        names = [self._engine.get_tensor_name(k) for k in range(self._engine.num_io_tensors)]
        inputs = [
            name
            for name in names
            if self._engine.get_tensor_mode(name) == library.TensorIOMode.INPUT
        ]
        for name in inputs:
            self._bind_input(library, name, np.asarray(feeds[name], order="C"))
        for name in names:
            if name not in inputs:
                size = self._context.get_max_output_size(name)
                self._context.set_tensor_address(name, cuda.allocate(int(size)))

    def _bind_input(self, library: Any, name: str, array: Array) -> None:
        on_cpu = self._engine.get_tensor_location(name) == library.TensorLocation.HOST
        # Inputs that sizes are computed from.
        if on_cpu:
            self._held.append(array)
        else:
            self._context.set_input_shape(name, tuple(array.shape))
        self._context.set_tensor_address(
            name, int(array.ctypes.data) if on_cpu else self._cuda.upload(array)
        )

    def enqueue(self) -> None:
        """Put one run into the stream."""
        if not self._context.execute_async_v3(self._cuda.stream.value):
            raise RuntimeError("the engine does not run")

    def make_block(self, launch: Launch) -> Callable[[], list[float]]:
        """Warm up a way to run, and make a block of it that lasts long enough to be measured."""
        single = partial(_time_launches, self._cuda, launch, self._cuda.make_events(2))
        end = time.perf_counter() + _WARM_UP
        while time.perf_counter() < end:
            single()
        events = self._cuda.make_events(count_block_runs(single) + 1)
        return partial(_time_launches, self._cuda, launch, events)


def _time_launches(cuda: Cuda, launch: Launch, events: Sequence[Any]) -> list[float]:
    """Seconds between neighbouring events with a launch between each two."""
    cuda.record(events[0])
    for event in events[1:]:
        launch()
        cuda.record(event)
    cuda.synchronize()
    return list(starmap(cuda.measure, pairwise(events)))
