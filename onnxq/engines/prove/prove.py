"""prove(): a model is built for an engine, and what its nodes and pairs became is read off the engine's own list."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import onnx

from onnxq.annotate import Inspection, WeightSums, inspect_model
from onnxq.config import matches
from onnxq.data import Dataset
from onnxq.emit import PLAN_KEY
from onnxq.engines.build import process as builds
from onnxq.engines.build.process import Job, Outcome, able
from onnxq.engines.prove.choice import choose_engine
from onnxq.engines.prove.compare import changes, read_proof
from onnxq.engines.prove.judge import heavy_nodes, judge, judge_sums, unasked_sums
from onnxq.engines.prove.kernels import HEAVY
from onnxq.engines.prove.ort_kernels import integer_kernels, read_optimized
from onnxq.engines.prove.proof import (
    BUILT,
    CRASHED,
    ENGINES,
    INT8,
    ORT,
    RTX,
    TRT,
    Build,
    Kernel,
    Proof,
    Reduced,
    Requirement,
)
from onnxq.engines.prove.reasons import Why
from onnxq.engines.prove.reduce import reduce
from onnxq.engines.prove.shapes import profile
from onnxq.engines.prove.trt_kernels import read_inspector, read_text
from onnxq.engines.saturation.measure import measure
from onnxq.engines.saturation.model import Cost
from onnxq.errors import ConfigError, OnnxqError, OutputError
from onnxq.files import ScratchFolder, replacing, saving_into
from onnxq.graph import GraphIndex, infer_shapes, inline_functions, name_nodes, save_model
from onnxq.nearest import did_you_mean
from onnxq.plan import from_json
from onnxq.progress import Progress, Task, silent
from onnxq.runtime import open_libraries
from onnxq.sites import Caution, Unquantized

_LIBRARIES = {
    RTX: ("tensorrt_rtx", "pip install 'onnxq[trt-rtx]'"),
    TRT: ("tensorrt", "pip install 'onnxq[trt]'"),
    ORT: ("onnxruntime", "pip install 'onnxq[cpu]'"),
}
_PACKAGES = {
    RTX: ("TensorRT for RTX", ("tensorrt-rtx",)),
    TRT: ("TensorRT", ("tensorrt", "tensorrt-cu13", "tensorrt-cu12")),
    ORT: ("ONNX Runtime", ("onnxruntime", "onnxruntime-gpu")),
}
CAPABILITY = "8.6"
TIMEOUT = 600.0
# A part is smaller than the whole; what takes longer than this is not worth waiting for.
_REDUCE_SECONDS, _PART_SECONDS = 180.0, 60.0
_CACHE = "timing.cache"
REDUCED = "reduced.onnx"


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What prove is asked for; see pipeline.prove. engine: None for the one that the plan in the model is for.

    dataset: what saturation is measured on.
    """

    engine: str | None = None
    capability: str | None = None
    require_int8: Sequence[str] = ()
    require_exact: bool = False
    dataset: Dataset | None = None
    threads: int = 0
    shapes: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=dict)
    compare: str | Path | None = None
    save: Path | None = None
    force: bool = False
    reduce: bool = False
    timeout: float = TIMEOUT
    progress: Progress = silent


def prove(source: str | Path | onnx.ModelProto, wish: Wish) -> Proof:
    """Build and judge. Raises OnnxqError for a wish that cannot be had; a build that fails is a Proof all the same."""
    before = None if wish.compare is None else read_proof(wish.compare)
    with wish.progress("reading the model"):
        inspection = _inspected(source)
        engine, chosen = wish.engine or "", ""
        if not engine:
            engine, chosen = choose_engine(inspection.model, wish.capability)
            wish = replace(wish, engine=engine)
        capability = _capability(wish, engine)
        proto = infer_shapes(inspection.model)
        index = GraphIndex(proto)
    required = _required(index, wish.require_int8)
    files = _Files(wish)
    shapes, note = ({}, "") if engine == ORT else profile(proto, index, wish.shapes)
    library, install = _LIBRARIES[engine]
    operators = open_libraries() if engine == ORT else ()
    job = Job(library=library, capability=capability, shapes=shapes, cache=files.cache, operators=operators)
    with ScratchFolder() as folder:
        with wish.progress(f"building with {_PACKAGES[engine][0]}, for at most {wish.timeout:g} s"):
            outcome = able(builds.build(inspection.model, job, folder, timeout=wish.timeout), library, install)
        if outcome.state == "usage":
            raise ConfigError(
                f"compute capability {wish.capability}", outcome.reason, "choose one of these", code="Q304"
            )
        with wish.progress("reading what was built"):
            kernels = _kernels(engine, outcome, proto, folder)
            weights = _weights(engine, index, kernels, folder)
            saved = files.keep(folder, outcome)
            guessed = [Caution("W112", note)] if note else []
            warnings = [*inspection.warnings, *guessed, *_otherwise(engine, outcome, folder)]
    reduced = None
    if wish.reduce and outcome.state != BUILT:
        reduced, saved = _reduced(index, job, outcome, wish, files, saved)
    build = _build(engine, capability, outcome, shapes, reduced, saved)
    why = Why(engine, index, inspection.pairs, _unquantized(proto), capability)
    with wish.progress("telling kernels from nodes and pairs"):
        nodes, sites = judge(index, inspection, kernels, why) if outcome.state == BUILT else ((), ())
    types = {one.node: one.type for one in nodes}
    proof = Proof(
        source=inspection.source,
        chosen=chosen,
        build=build,
        kernels=kernels,
        nodes=nodes,
        sites=sites,
        requirements=tuple(
            Requirement(pattern=pattern, nodes=names, unmet=tuple(n for n in names if types.get(n) != INT8))
            for pattern, names in required.items()
        ),
        weights=weights,
        cost=_cost(inspection.model, weights, wish) if outcome.state == BUILT else None,
        require_exact=wish.require_exact,
        warnings=tuple(warnings),
    )
    if before is None:
        return proof
    return replace(proof, compared=str(wish.compare), changes=tuple(changes(before, proof)))


def _cost(proto: onnx.ModelProto, weights: Sequence[WeightSums], wish: Wish) -> Cost | None:
    """Saturation on the samples, if there are any."""
    if wish.dataset is None:
        return None
    nodes = frozenset(one.node for one in weights if one.saturates)
    with wish.progress("counting sums that saturate", len(wish.dataset)) as task:
        found = measure(proto, wish.dataset.samples(), nodes=nodes, threads=wish.threads, on_sample=task.advance)
    return replace(found, data=wish.dataset.describe(), synthetic=wish.dataset.synthetic)


def _capability(wish: Wish, engine: str) -> str:
    """SM86 for 8.6; "" where the engine takes the GPU it finds."""
    if engine not in ENGINES:
        raise ConfigError(f"engine {engine!r}", "is not known", did_you_mean(engine, ENGINES), code="Q312")
    if engine != ORT and (wish.require_exact or wish.dataset is not None):
        asked = "`require_exact=True`" if wish.require_exact else "`data=…`"
        raise ConfigError(
            asked, "is about kernels of ONNX Runtime; TensorRT's sums are exact", "take `engine='ort'`", code="Q317"
        )
    if engine != RTX:
        if wish.capability is not None:
            raise ConfigError("compute capability", f"{engine} builds for this machine", "leave it out", code="Q317")
        return ""
    found = re.fullmatch(r"(?:sm_?)?(\d+)\.?(\d)", (wish.capability or CAPABILITY).lower())
    if found is None:
        raise ConfigError(f"compute capability {wish.capability!r}", "is none", "write it as 8.6", code="Q304")
    return f"SM{found[1]}{found[2]}"


def _inspected(source: str | Path | onnx.ModelProto) -> Inspection:
    """The model's pairs, every node of it in sight: named, and not inside a function."""
    found = inspect_model(source)
    if not found.model.functions:
        return found
    return replace(inspect_model(name_nodes(inline_functions(found.model))), source=found.source)


def _required(index: GraphIndex, patterns: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The heavy nodes each pattern selects, by name or operator. Raises ConfigError for one that selects none."""
    heavy = heavy_nodes(index)
    found: dict[str, tuple[str, ...]] = {}
    for pattern in patterns:
        try:
            found[pattern] = tuple(n.name for n in heavy if n.op_type == pattern or matches(pattern, n.name))
        except re.error as error:
            raise ConfigError(
                f"require_int8: {pattern}", f"is not a regular expression: {error}", code="Q309"
            ) from error
        if not found[pattern]:
            raise ConfigError(
                f"require_int8: {pattern}",
                f"matches none of the {len(heavy)} nodes that are judged ({', '.join(sorted(HEAVY))})",
                did_you_mean(pattern, [node.name for node in heavy]) if heavy else "",
                code="Q309",
            )
    return found


def _unquantized(proto: onnx.ModelProto) -> tuple[Unquantized, ...]:
    """What the plan inside the model left float, and why; () when there is none or it cannot be read."""
    text = next((entry.value for entry in proto.metadata_props if entry.key == PLAN_KEY), "")
    try:
        plan = from_json(text) if text else None
    except OnnxqError:
        return ()
    return (*plan.refusals, *plan.left_float) if plan is not None else ()


def _kernels(engine: str, outcome: Outcome, model: onnx.ModelProto, folder: Path) -> tuple[Kernel, ...]:
    if outcome.state != BUILT:
        return ()
    if engine == ORT:
        return read_optimized(model, onnx.load(folder / builds.OPTIMIZED))
    told = outcome.layers
    return read_inspector(told) if told.lstrip().startswith(("{", "[")) else read_text(told)


def _weights(engine: str, index: GraphIndex, kernels: Sequence[Kernel], folder: Path) -> tuple[WeightSums, ...]:
    """What of the weights can overflow 16-bit sums of ONNX Runtime; of the file alone where it was not built."""
    if engine != ORT:
        return ()
    found = judge_sums(index, kernels)
    if not kernels:
        return found
    optimized = GraphIndex(name_nodes(onnx.load(folder / builds.OPTIMIZED)))
    return (*found, *unasked_sums(index, kernels, optimized, found))


def _otherwise(engine: str, outcome: Outcome, folder: Path) -> Iterator[Caution]:
    """ONNX Runtime's kernels are found in its graph before tensors are laid out anew; say so when that changes them."""
    if engine == ORT and outcome.state == BUILT:
        before, after = (integer_kernels(onnx.load(folder / name)) for name in (builds.OPTIMIZED, builds.ENGINE))
        if before != after:
            told = ", ".join(f"{kind} {before[kind]} -> {after[kind]}" for kind in sorted(before | after))
            text = f"the last step of ONNX Runtime's optimization changes the integer kernels: {told}"
            yield Caution("W112", text)


def _build(
    engine: str,
    capability: str,
    outcome: Outcome,
    shapes: Mapping[str, tuple[tuple[int, ...], ...]],
    reduced: Reduced | None,
    saved: tuple[str, ...],
) -> Build:
    return Build(
        engine=engine,
        version=outcome.version or _installed(engine),
        state=outcome.state,
        capability=f"{capability[2:-1]}.{capability[-1]}" if capability else "",
        seconds=outcome.seconds,
        engine_bytes=outcome.engine_bytes,
        reason=outcome.reason,
        node=outcome.node,
        log=outcome.log,
        shapes=shapes,
        reduced=reduced,
        saved=saved,
    )


def _installed(engine: str) -> str:
    """The library's version, from its package: a process that died did not tell it."""
    title, packages = _PACKAGES[engine]
    for name in packages:
        try:
            return f"{title} {version(name)}"
        except PackageNotFoundError:
            continue
    return title


def kept_names(engine: str) -> dict[str, str]:
    """What a build makes -> what it is called in the user's folder."""
    if engine == ORT:
        return {builds.LOG: "build.log", builds.ENGINE: "optimized.onnx"}
    return {builds.LOG: "build.log", builds.LAYERS: "layers.txt", builds.ENGINE: "model.engine"}


@contextmanager
def saving(folder: Path | None, engine: str | None, *, force: bool) -> Iterator[None]:
    """Open the user's folder for a build's results, none of which may be an input.

    engine: None where the model decides later. Raises OutputError when the folder cannot be written, or holds earlier
    results (unless force).
    """
    if folder is None:
        yield
        return
    engines = _LIBRARIES if engine is None else (engine,)
    names = tuple(dict.fromkeys((*(name for one in engines for name in kept_names(one).values()), REDUCED)))
    for name in names:
        if (folder / name).exists() and not force:
            raise OutputError(str(folder / name), "exists", "choose another folder, or use `force=True`", code="Q601")
    with saving_into(folder, (*names, _CACHE), parents=True):
        yield


class _Files:
    """What the user keeps: the engine, the log, the list of kernels, the timing cache, the reduced model."""

    def __init__(self, wish: Wish) -> None:
        self.folder, self._names = wish.save, kept_names(wish.engine or RTX)

    @property
    def cache(self) -> str:
        """Where TensorRT's timing cache is kept; "" for nowhere. It grows from build to build."""
        return "" if self.folder is None else str((self.folder / _CACHE).resolve())

    def keep(self, folder: Path, outcome: Outcome) -> tuple[str, ...]:
        """Move what a build made to the user's folder; the files there are."""
        if self.folder is None:
            return ()
        found = []
        for name, kept in self._names.items():
            if (folder / name).exists() and (outcome.state == BUILT or name == builds.LOG):
                with (folder / name).open("rb") as made, replacing([self.folder / kept], overwrite=True) as files:
                    shutil.copyfileobj(made, files[0])
                found.append(str(self.folder / kept))
        return tuple(found)

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """A folder for one part's build."""
        with ScratchFolder() as folder:
            yield folder


def _reduced(
    index: GraphIndex, job: Job, whole: Outcome, wish: Wish, files: _Files, saved: tuple[str, ...]
) -> tuple[Reduced | None, tuple[str, ...]]:
    def fails(part: onnx.ModelProto) -> bool:
        shapes = _part_shapes(part, job.shapes)
        if shapes is None:
            return False
        with files.scratch() as folder:
            timeout = min(wish.timeout, _PART_SECONDS)
            outcome = builds.build(part, replace(job, shapes=shapes, cache=""), folder, timeout=timeout)
        return _alike(outcome, whole)

    with wish.progress(f"looking for the smallest part that fails, for at most {_REDUCE_SECONDS:g} s") as task:
        found = reduce(index, lambda part: _tried(fails, part, task), seconds=_REDUCE_SECONDS, hint=whole.node)
    if found is None:
        return None, saved
    model, reduced = found
    if files.folder is not None:
        path = files.folder / REDUCED
        save_model(model, path, overwrite=True)
        return replace(reduced, path=str(path)), (*saved, str(path))
    return reduced, saved


def _tried(fails: Callable[[onnx.ModelProto], bool], part: onnx.ModelProto, task: Task) -> bool:
    failed = fails(part)
    task.advance()
    return failed


def _alike(outcome: Outcome, whole: Outcome) -> bool:
    """The part ends as the whole did: in the same state, by the same signal or with the same words but for numbers."""
    if outcome.state != whole.state:
        return False
    if outcome.state == CRASHED or not whole.reason:
        return outcome.reason == whole.reason
    return _words(outcome.reason) == _words(whole.reason)


def _words(reason: str) -> str:
    """An error without what changes from graph to graph: names in quotes, numbers, addresses."""
    return re.sub(r"'[^']*'|\"[^\"]*\"|\[[^\]]*\]|\d+", "", reason)[:120]


def _part_shapes(
    part: onnx.ModelProto, known: Mapping[str, tuple[tuple[int, ...], ...]]
) -> dict[str, tuple[tuple[int, ...], ...]] | None:
    """Sizes of a part's inputs of no fixed size; None when they cannot be guessed."""
    try:
        index = GraphIndex(part)
        mine = {value.name: known[value.name] for value in index.inputs if value.name in known}
        return dict(profile(part, index, mine)[0])
    except OnnxqError:
        return None
