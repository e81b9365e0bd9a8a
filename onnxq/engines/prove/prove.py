"""Prove a model: build it for an engine, and find its nodes and pairs in the engine's own list of kernels."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import onnx

from onnxq.annotate import Inspection, WeightSums, inspect_model, read_plan_note
from onnxq.config import matches_any
from onnxq.data import Dataset
from onnxq.engines.builder import process
from onnxq.engines.builder.library import ENGINES, LIBRARIES, ORT, RTX, name_version
from onnxq.engines.builder.process import BuildResult, BuildState, Job, build_engine, check_library
from onnxq.engines.builder.shapes import make_profile
from onnxq.engines.prove.choice import choose_engine
from onnxq.engines.prove.compare import find_changes, read_proof
from onnxq.engines.prove.judge import find_heavy_nodes, judge_model, judge_optimizer_sums, judge_sums
from onnxq.engines.prove.kernels import HEAVY, PRODUCTS
from onnxq.engines.prove.ort_kernels import count_integer_kernels, read_optimized
from onnxq.engines.prove.proof import QUANTIZED, STORED, TYPES, Build, Kernel, NodeProof, Proof, Reduced, Requirement
from onnxq.engines.prove.reasons import Reasons
from onnxq.engines.prove.reduce import find_smallest_failure
from onnxq.engines.prove.trt_kernels import read_inspector, read_layers_message
from onnxq.engines.saturation.measure import measure_saturation
from onnxq.engines.saturation.model import Cost
from onnxq.errors import ConfigError, OnnxqError, OutputError
from onnxq.files import ScratchFolder, prepare_folder, replace_files
from onnxq.graph import GraphIndex, ModelLike, add_libraries, infer_shapes, inline_functions, name_nodes, save_model
from onnxq.graph.integer_products import read_integer_products
from onnxq.nearest import suggest_names
from onnxq.progress import Progress, silent
from onnxq.sites import Caution, Unquantized

# Compute capability that engines are built for where none is asked for: GeForce 30.
CAPABILITY = "8.6"
# That of the GPU in this machine.
CURRENT = "current"
# Seconds.
TIMEOUT = 600.0
# Seconds in all and for a part, which is smaller than the whole: a longer build is not worth waiting for.
_REDUCE_SECONDS, _PART_SECONDS = 180.0, 60.0
_CACHE = "timing.cache"
REDUCED = "reduced.onnx"


@dataclass(frozen=True, kw_only=True)
class ProveRequest:
    """The options of `pipeline.prove`."""

    # None for the one that the plan in the model is for.
    engine: str | None = None
    capability: str | None = None
    # (type, pattern) of nodes that must run in the type, and types that none may compute in.
    require: Sequence[tuple[str, str]] = ()
    forbid: Sequence[str] = ()
    require_exact: bool = False
    # Samples that saturation is measured on.
    dataset: Dataset | None = None
    threads: int = 0
    shapes: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=dict)
    compare: str | Path | None = None
    save: Path | None = None
    force: bool = False
    reduce: bool = False
    # Seconds.
    timeout: float = TIMEOUT
    # Of custom operators, for ONNX Runtime; with plugins, for TensorRT.
    libraries: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()
    progress: Progress = silent


def prove_model(source: str | Path | onnx.ModelProto, request: ProveRequest) -> Proof:
    """Build and judge. Raises OnnxqError for options that do not fit; a build that fails is a Proof all the same."""
    # First, so that a file that cannot be read is not found out only after minutes of building.
    before = None if request.compare is None else read_proof(request.compare)
    with request.progress("reading the model"):
        inspection = _inspect_all_nodes(source)
        engine, chosen = request.engine or "", ""
        if not engine:
            engine, chosen = choose_engine(inspection.model, request.capability)
        capability = _read_capability(request, engine)
        proto = infer_shapes(add_libraries(read_integer_products(inspection.model), request.libraries))
        index = GraphIndex(proto)
        reasons = Reasons(engine, index, inspection.pairs, _find_unquantized(proto), capability)
    required = _select_required(index, request.require, reasons)
    _check_types(request.forbid, "forbid")
    # ONNX Runtime builds for any size.
    shapes, note = ({}, "") if engine == ORT else make_profile(proto, index, request.shapes)
    operators, plugins = (request.libraries, ()) if engine == ORT else ((), request.plugins)
    # TensorRT's timing cache grows from build to build.
    cache = "" if request.save is None else str((request.save / _CACHE).resolve())
    job = Job(
        engine=engine, capability=capability, shapes=shapes, cache=cache, operators=operators, plugins=plugins
    )  # fmt: skip
    with ScratchFolder() as folder:
        with request.progress(f"building with {LIBRARIES[engine].title}, for at most {request.timeout:g} s"):
            result = check_library(build_engine(inspection.model, job, folder, timeout=request.timeout), engine)
        if result.state is BuildState.NO_CAPABILITY:
            subject = f"compute capability {request.capability}"
            raise ConfigError(subject, result.reason, "choose one of these", code="Q304")
        built = result.state is BuildState.BUILT
        with request.progress("reading the engine"):
            kernels = _read_kernels(engine, proto, folder) if built else ()
            weights = _find_weights(engine, index, kernels, folder)
            saved = _copy_files(folder, result, engine, request.save)
            guesses = [Caution("W112", note)] if note else []
            warnings = [*inspection.warnings, *guesses, *_find_layout_changes(engine, result, folder)]
    reduced = _reduce(index, job, result, request) if request.reduce and not built else None
    if reduced is not None and reduced.path:
        saved = (*saved, reduced.path)
    with request.progress("finding the kernels of nodes and pairs"):
        nodes, sites = judge_model(index, inspection, kernels, reasons) if built else ((), ())
    proof = Proof(
        source=inspection.source,
        chosen=chosen,
        build=replace(_describe_build(job, result, reduced, saved), needs_plugin=_is_custom(index, result.node)),
        kernels=kernels,
        nodes=nodes,
        sites=sites,
        requirements=(*_check_required(required, nodes), *_check_forbidden(request.forbid, nodes)),
        weights=weights,
        cost=_measure_cost(add_libraries(inspection.model, request.libraries), weights, request) if built else None,
        require_exact=request.require_exact,
        warnings=tuple(warnings),
    )
    if before is None:
        return proof
    return replace(proof, compared=str(request.compare), changes=tuple(find_changes(before, proof)))


def _measure_cost(proto: ModelLike, weights: Sequence[WeightSums], request: ProveRequest) -> Cost | None:
    """Saturation on the samples, if there are any."""
    if request.dataset is None:
        return None
    nodes = frozenset(one.node for one in weights if one.saturates)
    with request.progress("counting sums that saturate", len(request.dataset)) as task:
        samples = request.dataset.samples()
        found = measure_saturation(proto, samples, nodes=nodes, threads=request.threads, on_sample=task.advance)
    return replace(found, data=request.dataset.describe(), synthetic=request.dataset.synthetic)


def _read_capability(request: ProveRequest, engine: str) -> tuple[int, ...]:
    """(8, 6) for "8.6"; () where the engine takes the GPU it finds."""
    if engine not in ENGINES:
        raise ConfigError(f"engine {engine!r}", "is not known", suggest_names(engine, ENGINES), code="Q312")
    if engine != ORT and (request.require_exact or request.dataset is not None):
        asked = "`require_exact=True`" if request.require_exact else "`data=…`"
        cause = "is about kernels of ONNX Runtime; TensorRT's sums are exact"
        raise ConfigError(asked, cause, "take `engine='ort'`", code="Q317")
    if engine != RTX:
        if request.capability is not None:
            raise ConfigError("compute capability", f"{engine} builds for this machine", "leave it out", code="Q317")
        return ()
    if request.capability == CURRENT:
        return ()
    found = re.fullmatch(r"(?:sm_?)?(\d+)\.?(\d)", (request.capability or CAPABILITY).lower())
    if found is None:
        raise ConfigError(f"compute capability {request.capability!r}", "is none", "write it as 8.6", code="Q304")
    return int(found[1]), int(found[2])


def _inspect_all_nodes(source: str | Path | onnx.ModelProto) -> Inspection:
    """The model's pairs, with every node named and outside functions."""
    found = inspect_model(source)
    if not found.model.functions:
        return found
    return replace(inspect_model(name_nodes(inline_functions(found.model))), source=found.source)


def _check_types(types: Iterable[str], option: str) -> None:
    for dtype in types:
        if dtype not in TYPES:
            cause = "is no type that a kernel computes in or keeps weights in"
            raise ConfigError(f"{option}: {dtype}", cause, suggest_names(dtype, TYPES), code="Q312")


def _select_required(
    index: GraphIndex, wanted: Sequence[tuple[str, str]], reasons: Reasons
) -> dict[tuple[str, str], tuple[str, ...]]:
    """The heavy nodes that each (type, pattern) selects, by name or operator; of types of weights those with a weight,
    of `quantized` those with pairs.

    Raises ConfigError for an unknown type, or a pattern that selects none.
    """
    _check_types((dtype for dtype, _ in wanted if dtype != QUANTIZED), "require")
    every = find_heavy_nodes(index)
    found: dict[tuple[str, str], tuple[str, ...]] = {}
    for dtype, pattern in wanted:
        subject = f"require: {pattern}"
        heavy = list(every)
        if dtype == QUANTIZED:
            heavy = [node for node in every if reasons.is_quantized(node)]
        elif dtype in STORED:
            heavy = [node for node in every if reasons.has_weight(node)]
        try:
            names = tuple(n.name for n in heavy if n.op_type == pattern or matches_any(pattern, n.name))
        except re.error as error:
            raise ConfigError(subject, f"is not a regular expression: {error}", code="Q309") from error
        if not names:
            kinds = "products with pairs" if dtype == QUANTIZED else ", ".join(sorted(HEAVY))
            cause = f"matches none of the {len(heavy)} nodes that are judged ({kinds})"
            near = suggest_names(pattern, [node.name for node in heavy]) if heavy else ""
            raise ConfigError(subject, cause, near, code="Q309")
        found[dtype, pattern] = names
    return found


def _check_required(
    required: Mapping[tuple[str, str], tuple[str, ...]], nodes: Sequence[NodeProof]
) -> Iterator[Requirement]:
    proven = {one.node: one for one in nodes}
    for (dtype, pattern), names in required.items():
        unmet = tuple(name for name in names if name not in proven or not proven[name].runs_in(dtype))
        yield Requirement(dtype=dtype, pattern=pattern, nodes=names, unmet=unmet)


def _check_forbidden(forbidden: Sequence[str], nodes: Sequence[NodeProof]) -> Iterator[Requirement]:
    # Engines add up a pool in float32 whatever the file says, and it costs next to nothing.
    products = [one for one in nodes if one.op in PRODUCTS]
    for dtype in dict.fromkeys(forbidden):
        unmet = tuple(one.node for one in products if dtype in one.computed)
        yield Requirement(dtype=dtype, forbidden=True, nodes=tuple(one.node for one in products), unmet=unmet)


def _find_unquantized(proto: ModelLike) -> tuple[Unquantized, ...]:
    """The nodes that the plan inside the model left float; () when there is none or it cannot be read."""
    plan = read_plan_note(proto)
    return (*plan.refusals, *plan.left_float) if plan is not None else ()


def _read_kernels(engine: str, model: ModelLike, folder: Path) -> tuple[Kernel, ...]:
    if engine == ORT:
        return read_optimized(model, onnx.load(folder / process.OPTIMIZED))
    inspection = folder / process.INSPECTION
    if os.path.exists(inspection):
        return read_inspector(inspection.read_text(encoding="utf-8"))
    return read_layers_message((folder / process.LAYERS).read_text(encoding="utf-8"))


def _find_weights(engine: str, index: GraphIndex, kernels: Sequence[Kernel], folder: Path) -> tuple[WeightSums, ...]:
    """The weights that can overflow 16-bit sums of ONNX Runtime; those of the file alone where it was not built."""
    if engine != ORT:
        return ()
    found = judge_sums(index, kernels)
    if not kernels:
        return found
    optimized = GraphIndex(name_nodes(onnx.load(folder / process.OPTIMIZED)))
    return (*found, *judge_optimizer_sums(index, kernels, optimized, found))


def _find_layout_changes(engine: str, result: BuildResult, folder: Path) -> Iterator[Caution]:
    """ONNX Runtime's kernels are found in its graph before tensors are laid out anew; warn when that changes them."""
    if engine == ORT and result.state is BuildState.BUILT:
        paths = (folder / process.OPTIMIZED, folder / process.ENGINE)
        before, after = (count_integer_kernels(onnx.load(path)) for path in paths)
        if before != after:
            counts = ", ".join(f"{kind} {before[kind]} -> {after[kind]}" for kind in sorted(before | after))
            text = f"the last step of ONNX Runtime's optimization changes the integer kernels: {counts}"
            yield Caution("W112", text)


def _is_custom(index: GraphIndex, name: str) -> bool:
    """True for a node whose operator ONNX does not know."""
    return any(node.name == name and not onnx.defs.has(node.op_type, node.domain) for node in index.nodes)


def _describe_build(job: Job, result: BuildResult, reduced: Reduced | None, saved: tuple[str, ...]) -> Build:
    return Build(
        engine=job.engine,
        version=name_version(job.engine),
        state=result.state,
        capability=".".join(map(str, job.capability)),
        seconds=result.seconds,
        engine_bytes=result.engine_bytes,
        reason=result.reason,
        node=result.node,
        log=result.log,
        shapes=job.shapes,
        reduced=reduced,
        saved=saved,
    )


def find_saved_names(engine: str) -> dict[str, str]:
    """The files of a build -> their names in the user's folder."""
    if engine == ORT:
        return {process.LOG: "build.log", process.ENGINE: "optimized.onnx"}
    kernels = {process.LAYERS: "layers.txt", process.INSPECTION: "layers.txt"}
    return {process.LOG: "build.log", **kernels, process.ENGINE: "model.engine"}


@contextmanager
def open_output_folder(folder: Path | None, engine: str | None, *, force: bool) -> Iterator[None]:
    """Open the user's folder for a build's results, none of which may be an input.

    engine: None where the model decides later. Raises OutputError when the folder cannot be written, or holds earlier
    results (unless force).
    """
    if folder is None:
        yield
        return
    engines = ENGINES if engine is None else (engine,)
    names = tuple(dict.fromkeys((*(name for one in engines for name in find_saved_names(one).values()), REDUCED)))
    for name in names:
        if os.path.exists(folder / name) and not force:
            raise OutputError(str(folder / name), "exists", "choose another folder, or use `force=True`", code="Q601")
    with prepare_folder(folder, (*names, _CACHE), parents=True):
        yield


def _copy_files(folder: Path, result: BuildResult, engine: str, save: Path | None) -> tuple[str, ...]:
    """Copy a build's files to the user's folder, if there is one; returns their paths there."""
    if save is None:
        return ()
    found = []
    for name, kept in find_saved_names(engine).items():
        # Of a build that failed only the log says anything.
        if os.path.exists(folder / name) and (result.state is BuildState.BUILT or name == process.LOG):
            with (folder / name).open("rb") as made, replace_files([save / kept], overwrite=True) as files:
                shutil.copyfileobj(made, files[0])
            found.append(str(save / kept))
    return tuple(found)


def _reduce(index: GraphIndex, job: Job, whole: BuildResult, request: ProveRequest) -> Reduced | None:
    """The smallest part that fails as the whole does, written to the user's folder if there is one."""
    timeout = min(request.timeout, _PART_SECONDS)

    def fails(part: ModelLike) -> bool:
        try:
            part_index = GraphIndex(part)
            known = {value.name: job.shapes[value.name] for value in part_index.inputs if value.name in job.shapes}
            shapes = make_profile(part, part_index, known)[0]
        except OnnxqError:  # sizes of its inputs cannot be guessed
            return False
        finally:
            task.advance()
        with ScratchFolder() as folder:
            # Without the user's timing cache, which such builds would fill with kernels of no use.
            result = build_engine(part, replace(job, shapes=shapes, cache=""), folder, timeout=timeout)
        return result.fails_like(whole)

    with request.progress(f"looking for the smallest part that fails, for at most {_REDUCE_SECONDS:g} s") as task:
        found = find_smallest_failure(index, fails, seconds=_REDUCE_SECONDS, hint=whole.node)
    if found is None or request.save is None:
        return None if found is None else found[1]
    save_model(found[0], request.save / REDUCED, overwrite=True)
    return replace(found[1], path=str(request.save / REDUCED))
