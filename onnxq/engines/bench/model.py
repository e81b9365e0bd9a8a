"""Models timed side by side on one engine, with their kernels; frozen values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from onnxq.engines.prove.proof import Proof
from onnxq.runtime import Latency
from onnxq.sites import Caution
from onnxq.wording import abbreviate


class Untimed(str, Enum):
    """Why engines were built and not timed."""

    NO_GPU = "no GPU"
    OTHER_GPU = "built for another GPU"
    NOT_BUILT = "no model was built"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, kw_only=True)
class EngineTimes:
    """Times by model. device: the GPU's name, or the kind of CPU.

    eager: of a run launched kernel by kernel; graph: as one CUDA graph. reasons: why a model, or a way, was not timed.
    """

    device: str = ""
    eager: Mapping[str, Latency] = field(default_factory=dict)
    graph: Mapping[str, Latency] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class BenchedModel:
    """One model. name: its file, as given. proof: the build and its kernels, None where a provider shows none.

    eager, graph, reason: as of EngineTimes; None and "" without one.
    """

    name: str
    proof: Proof | None = None
    eager: Latency | None = None
    graph: Latency | None = None
    reason: str = ""

    @property
    def best(self) -> Latency | None:
        """The faster way to run it."""
        timed = [one for one in (self.eager, self.graph) if one is not None]
        return min(timed, key=lambda one: one.median_ms, default=None)

    @property
    def types(self) -> Counter[str]:
        """How many heavy nodes run in which type."""
        return Counter(one.type for one in self.proof.nodes) if self.proof is not None else Counter()

    @property
    def built(self) -> bool:
        """False when the engine was not built."""
        return self.proof is None or self.proof.built


@dataclass(frozen=True, kw_only=True)
class Bench:
    """The comparison. version: of the engine. chosen: why it is this one, "" where the caller named it.

    device: as of EngineTimes. provider: of ONNX Runtime, "" for other engines. untimed: why nothing was timed, None
    where something was. shapes: of the inputs. data: the samples they are from.
    """

    __repr__ = abbreviate

    engine: str
    version: str
    models: tuple[BenchedModel, ...]
    chosen: str = ""
    device: str = ""
    provider: str = ""
    untimed: Untimed | None = None
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    data: str = ""
    synthetic: bool = False
    warnings: tuple[Caution, ...] = ()

    @property
    def failed(self) -> tuple[BenchedModel, ...]:
        """Models whose engine was not built, or that were not timed where others were."""
        return tuple(one for one in self.models if not one.built or (self.untimed is None and one.best is None))

    def ratio(self, model: BenchedModel) -> float | None:
        """How many times faster a model is than the first, each in its faster way; None where one was not timed."""
        base, own = self.models[0].best, model.best
        return own.speedup(base) if base is not None and own is not None else None
