"""An engine: a library that builds, runs and times models for a backend, as the commands ask for it.

A backend gives an instance of a subclass. What needs its library is imported inside the methods, so that plans can be
made where the library is not installed; every method has a default, for engines that cannot do it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import onnx

from onnxq.arrays import RunValues, Shape
from onnxq.errors import ConfigError, VerificationError
from onnxq.graph import Dims, GraphIndex, ModelLike, NodeRef
from onnxq.runtime import Feeds, Latency, Session
from onnxq.sites import (
    Causes,
    Caution,
    EngineOptions,
    JsonObject,
    Lines,
    Names,
    NameSet,
    Refusal,
    Refusals,
)
from onnxq.wording import Word

if TYPE_CHECKING:
    from onnxq.config.data import RuntimeConfig

# Files of a build: the log, and the engine. How engines list their kernels is their own affair.
LOG = "build.log"
ENGINE = "engine"
MODEL = "model.onnx"
# (min, opt, max) of the inputs whose shape is not fixed.
Profile = Mapping[str, tuple[Shape, ...]]
# Of an NVIDIA GPU, (8, 9) and the like; () of other devices.
ComputeCapability = tuple[int, ...]
_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """A tensor between kernels."""

    name: str
    # onnxq's name (int8, float32 …), "" unknown.
    dtype: str
    # -1 for a dynamic axis.
    shape: Shape = ()
    # In the engine's words.
    layout: str = ""

    @property
    def size(self) -> int:
        """Number of elements; dynamic axes count once."""
        return math.prod(max(dim, 1) for dim in self.shape)


Tensors = tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One kernel of a built model."""

    name: str
    # The engine's own word (correlation, gemm, kgen, QLinearConv …).
    kind: str
    # Names of the ONNX nodes it computes, wholly or in part.
    nodes: Names = ()
    inputs: Tensors = ()
    # Constants it reads.
    weights: Tensors = ()
    outputs: Tensors = ()
    # The implementation, "" where the engine hides it.
    tactic: str = ""
    # It lays data out anew, copies it or converts its type, and computes nothing.
    moves: bool = False


# In the order they run.
Kernels = tuple[Kernel, ...]


@dataclass(frozen=True, kw_only=True)
class DevicePlacement:
    """The parts of a model that run on an engine's device, and the nodes that the CPU runs instead, each with a fix."""

    partitions: int
    left: Refusals


@dataclass(frozen=True, kw_only=True)
class KernelWords:
    """How an engine names its kernels.

    products, pools: parts of the kinds, in lower case, that do such a node's work; a kind that holds the operator's
    name does so anyway. attention: part of the names of fused attention. dequantizes: the kind that reads integers,
    dequantizes them and multiplies floats. int8: kinds that compute on integers whatever their tensors say. packed:
    kinds on float data and weights of few bits. integers: products are integer ones for data and weights of any
    width. shifts: signed data are made unsigned ones, which add up in 16 bits where those do.
    """

    products: Names = ()
    pools: Names = ()
    attention: str = ""
    dequantizes: str = ""
    int8: NameSet = frozenset()
    packed: Names = ()
    integers: bool = False
    shifts: bool = False


class BuildState(Word):
    """How a build ended."""

    BUILT = "built"
    REFUSED = "refused"  # by the parser
    FAILED = "failed"  # in the builder
    CRASHED = "crashed"
    LATE = "timed out"
    # The library cannot work here: not installed, no GPU, not for the compute capability asked for, no such plugin.
    MISSING = "missing"
    UNABLE = "unable"
    NO_CAPABILITY = "no capability"
    NO_PLUGIN = "no plugin"


@dataclass(frozen=True, kw_only=True)
class Job:
    """A build, as its child process is told of it."""

    # E.g. (8, 6), () for the GPU in this machine.
    capability: ComputeCapability = ()
    shapes: Profile = field(default_factory=dict)
    # A timing cache to read and write, "" none.
    cache: str = ""
    # Paths of libraries with custom operators, and with plugins.
    operators: Names = ()
    plugins: Names = ()
    # The engine also gives the tensors that survive fusion; this prevents none, as outputs would.
    debug_tensors: bool = False
    # Float32 factors may be rounded to it.
    tf32: bool = True
    # As of Engine.
    options: EngineOptions = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class BuildResult:
    """How a build ended."""

    state: BuildState
    seconds: float = 0.0
    # Why there is no engine, in the library's words, the node that it blames, and a remedy where one is known.
    reason: str = ""
    node: str = ""
    fix: str = ""
    # Its last lines, when it did not end well.
    log: Lines = ()
    engine_bytes: int = 0
    # Of a process that crashed.
    exit_code: int = 0


class Untimed(Word):
    """Why engines were built and not timed."""

    NO_GPU = "no GPU"
    OTHER_GPU = "built for another GPU"
    NOT_BUILT = "no model was built"


@dataclass(frozen=True, eq=False)
class TimedModel:
    """A model to time on its own feeds. path: of the file that its build left."""

    model: ModelLike
    path: Path
    feeds: Feeds


@dataclass(frozen=True, kw_only=True)
class Timing:
    """How models are timed. rounds: None for as many as the seconds take. threads, provider: of ONNX Runtime."""

    rounds: int | None = None
    seconds: float = 8.0
    threads: int = 1
    provider: str = ""
    plugins: Names = ()


@dataclass(frozen=True, kw_only=True)
class EngineTimes:
    """Times by model. device: the GPU's name, or the kind of CPU.

    eager: of a run launched kernel by kernel; graph: as one CUDA graph. reasons: why a model, or a way, was not timed.
    """

    device: str = ""
    eager: Mapping[str, Latency] = field(default_factory=dict)
    graph: Mapping[str, Latency] = field(default_factory=dict)
    reasons: Causes = field(default_factory=dict)


class Runner(Protocol):
    """One model in one engine. seconds: of its last run."""

    name: str
    seconds: float

    def infer(self, feeds: Feeds) -> RunValues:
        """One sample: arrays by name, lists for sequences."""


@dataclass(eq=False)
class SessionRunner:
    """A Runner of a session of ONNX Runtime. outputs: those to compute, None for all."""

    name: str
    session: Session
    outputs: Sequence[str] | None = None
    seconds: float = 0.0

    def infer(self, feeds: Feeds) -> RunValues:
        """One sample: arrays by name, lists for sequences."""
        start = time.perf_counter()
        # Samples hold the float model's choices too, which it does not take itself.
        values = self.session.run(
            {value.name: feeds[value.name] for value in self.session.inputs}, self.outputs
        )
        self.seconds = time.perf_counter() - start
        return values


class Engine:
    """One library of a backend. name: the value of `engine` in `prove` and `bench`. family: that of the backend.

    module, packages, install: the Python module, the distributions that may hold it, and the command that installs one.
    """

    name = ""
    title = ""
    family = ""
    # The device that it builds for, behind its name in the help of commands.
    place = ""
    module = ""
    packages: Names = ()
    install = ""
    # The package, with what it needs itself; "" for the module alone.
    needs = ""
    # What helps where it needs a device that is not there.
    unable_fix = "run it where there is one"
    # Options of the commands that it serves: "ort_library", "plugin", "provider", "compute_capability", "soc",
    # "htp_arch".
    takes: Names = ()
    # It builds for devices that are not in this machine.
    builds_ahead = False
    # A build serves inputs of any size, or of one alone.
    any_size = False
    one_size = False
    # A build is a model that applications load in the place of its own.
    compiles = False
    # It runs in an emulator, which is slow and whose times say nothing of the device.
    emulated = False
    # The check of `quantize` asks it for answers, and for times where it is not emulated.
    judges = False
    # Settings of its library, by the library's names.
    options: EngineOptions = _NOTHING
    # Kernels on some CPUs add products in 16 bits, as `Backend.sums` describes.
    saturates = False
    # A runner can give the tensors that survive fusion.
    shows_inner = False
    # Weights wider or narrower than 8 bits have kernels.
    packs_weights = True
    words = KernelWords()
    # Operators without an int8 kernel.
    no_kernel: Names = ()
    # Pairs whose worth lies elsewhere than in a kernel that reads their integers, by the rule that placed them.
    purposes: Mapping[str, str] = _NOTHING
    # Files of a build -> their names in the user's folder.
    saved: Mapping[str, str] = MappingProxyType({LOG: "build.log", ENGINE: "model.engine"})

    @property
    def installed(self) -> bool:
        """True when its library can be imported here."""
        return not self.module or find_spec(self.module) is not None

    def describe_version(self) -> str:
        """The library with its version, e.g. "ONNX Runtime 1.32.0"; without it where no package has one.

        Read from the packages, not from the library: a process that crashed cannot say it.
        """
        for package in self.packages:
            try:
                return f"{self.title} {version(package)}"
            except PackageNotFoundError:
                continue
        return self.title

    def with_options(self, runtime: RuntimeConfig) -> Engine:
        """The engine with the settings that a configuration asks for."""
        return self

    # Building, in a child process, and reading the kernels.

    def read_capability(self, text: str | None) -> ComputeCapability:
        """(8, 6) for "8.6"; () for the device of this machine. Raises ConfigError for text that fits nothing."""
        if text is not None:
            raise ConfigError(
                "compute capability",
                f"{self.name} builds for this machine",
                "leave it out",
                code="Q317",
            )
        return ()

    def prepare_environment(self, job: Job, folder: Path) -> EngineOptions:
        """Variables that the child process needs. folder: its own."""
        return _NOTHING

    def build(self, job: Job, folder: Path) -> BuildResult:
        """Build the model in `folder`, in the child process, and write the engine and its kernels there."""
        raise NotImplementedError

    def read_kernels(self, model: ModelLike, folder: Path) -> Kernels:
        """The kernels of a build in the order they run."""
        return ()

    def read_placement(self, model: ModelLike, folder: Path) -> DevicePlacement | None:
        """Where the nodes of a build run; None for engines that run all of them on one device, or none."""
        return None

    def read_optimized(self, folder: Path) -> onnx.ModelProto | None:
        """The graph that the kernels are nodes of; None where the engine has no graph of ONNX."""
        return None

    def list_kernels(self, model: ModelLike) -> Kernels:
        """The kernels of a model, optimized in this process. Raises ModelError for one that is refused."""
        return ()

    def list_warnings(self, folder: Path) -> Iterator[Caution]:
        """Doubts about a build that went well."""
        return iter(())

    # Reasons of `prove`. "" wherever the engine has nothing to say.

    def explain_weight(self, index: GraphIndex, node: NodeRef) -> str:
        """Why the integers of a weight are dequantized in front of a product with float data."""
        return ""

    def explain_capability(self, capability: ComputeCapability) -> str:
        """Why a GPU has no int8 kernels."""
        return ""

    def explain_operand(self, node: NodeRef, scale: Dims | None, role: str) -> str:
        """Why a kernel does not take a pair with a scale of this shape on data. role: "input", or "input 1" …"""
        return ""

    def explain_result(self, index: GraphIndex, node: NodeRef) -> str:
        """Why what stands behind a product keeps it from its int8 kernel."""
        return ""

    def explain_data(self, dtype: str) -> str:
        """Why data of this type keeps a product in float though its pairs are in place."""
        return ""

    # Running and timing.

    def find_obstacle(self) -> Refusal | None:
        """Why models cannot be run on this machine; None when it can be tried."""
        if not self.judges:
            return Refusal(self.name, f"onnxq does not run models with {self.title}", code="R111")
        cause = f"{self.needs or self.module} is not installed"
        return None if self.installed else Refusal(self.name, cause, self.install, code="R111")

    def open_runner(
        self, name: str, model: ModelLike, job: Job, folder: Path
    ) -> AbstractContextManager[Runner]:
        """A runner of a model, built as a job says in a folder. name: of the runner.

        With `debug_tensors` it also gives the tensors that survive fusion. Raises ModelError in the library's words.
        """
        raise NotImplementedError

    def find_local(self) -> Engine:
        """The engine of the same backend that runs on the device of this machine."""
        return self

    def choose_device(self, capability: str | None) -> tuple[str | None, Untimed | None]:
        """The compute capability to build for, and why its builds cannot be timed here."""
        return capability, None

    def demand_device(self, subject: str) -> None:
        """Raise VerificationError naming `subject` where nothing can be timed here."""
        if self.emulated:
            cause = f"{self.title} is emulated here, and the time of an emulator says nothing of the device's"
            fix = "time the model on the device; `prove` says what runs there, and `diff` what it answers"
            raise VerificationError(subject, cause, fix, code="Q708")
        obstacle = self.find_obstacle()
        if obstacle is not None:
            raise VerificationError(subject, obstacle.reason, obstacle.fix, code="Q708")

    def time_models(self, models: Mapping[str, TimedModel], timing: Timing) -> EngineTimes:
        """Time built models side by side. Raises VerificationError where none can be timed."""
        raise NotImplementedError

    def run_job(self, job: JsonObject, folder: Path) -> JsonObject:
        """Do in a child process what `building.run_child` was given, with files in `folder`; returns JSON."""
        raise NotImplementedError
