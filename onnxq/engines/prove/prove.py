"""Prove a model: build it for an engine, and find its nodes and pairs in the engine's own list of kernels."""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import onnx

from onnxq.annotate import Inspection, WeightSums, inspect_model, read_plan_note
from onnxq.backends import Engine, find_backend, find_engine, find_usual_engine, list_engines
from onnxq.backends.building import build_engine, check_library, copy_file, fail_alike
from onnxq.backends.engine import (
    LOG,
    BuildResult,
    BuildState,
    ComputeCapability,
    DevicePlacement,
    Job,
    Kernels,
    Profile,
)
from onnxq.config import ProveConfig, RuntimeConfig, matches_any
from onnxq.data import Dataset
from onnxq.engines.prove.judge import find_heavy_nodes, judge_model, judge_weights
from onnxq.engines.prove.kernels import HEAVY, PRODUCTS
from onnxq.engines.prove.proof import (
    INT8,
    INTEGERS,
    QUANTIZED,
    STORED,
    TYPES,
    Build,
    NodeProof,
    Proof,
    Reduced,
    Requirement,
    find_changes,
    read_proof,
)
from onnxq.engines.prove.reasons import Reasons
from onnxq.engines.prove.reduce import find_smallest_failure
from onnxq.engines.saturation import SaturationCost, measure_saturation
from onnxq.engines.shapes import demand_sizes, make_profile, warn_guesses
from onnxq.errors import ConfigError, OnnxqError, OutputError, suggest_names
from onnxq.files import ScratchFolder, prepare_folder
from onnxq.graph import GraphIndex, ModelLike, ModelSource, add_libraries, infer_shapes, save_model
from onnxq.graph.base import DEQUANTIZE, QUANTIZE
from onnxq.graph.convert import inline_functions
from onnxq.graph.integer_operators import read_integer_operators
from onnxq.graph.qoperators import INTEGER_OPERATORS
from onnxq.progress import Progress, count_items, silent
from onnxq.sites import Cautions, Names, UnquantizedNodes, drop_repeats

# Seconds in all and for a part, which is smaller than the whole: a longer build is not worth waiting for.
_REDUCE_SECONDS = 180.0
_PART_SECONDS = 60.0
_CACHE = "timing.cache"
# Of zero points, and of weights of MatMulNBits: TensorRT reads none of them.
_UNREAD_TYPES = {onnx.TensorProto.UINT8, onnx.TensorProto.UINT16, onnx.TensorProto.INT16}
REDUCED = "reduced.onnx"


@dataclass(frozen=True, kw_only=True)
class ProveRequest:
    """The options of `prove`, and the samples and sizes, folder and libraries that go with them."""

    options: ProveConfig
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    # Samples that saturation is measured on.
    dataset: Dataset | None = None
    shapes: Profile = field(default_factory=dict)
    save: Path | None = None
    progress: Progress = silent


def prove_model(source: ModelSource, request: ProveRequest) -> Proof:
    """Build and judge. Raises OnnxqError for options that do not fit; a build that fails is a Proof all the same."""
    # First, so that a file that cannot be read is not found out only after minutes of building.
    options = request.options
    before = read_proof(options.compare) if options.compare else None
    with request.progress("reading the model"):
        inspection = _inspect_all_nodes(source)
        engine, chosen = _find_engine(inspection.model, request)
        capability = engine.read_capability(options.compute_capability)
        # Operators on integers are judged as the float ones that they stand for.
        paired = read_integer_operators(inspection.model)
        proto = infer_shapes(add_libraries(paired, request.runtime.libraries))
        index = GraphIndex(proto)
        reasons = Reasons(engine, index, inspection.pairs, _find_unquantized(proto), capability)
    wanted = (*((INT8, pattern) for pattern in options.require_int8), *options.require)
    required = _select_required(index, wanted, reasons)
    _check_types(options.forbid, "forbid")
    shapes, guesses = _find_shapes(engine, index, request)
    job = _make_job(engine, capability, shapes, request)
    with ScratchFolder() as folder:
        with request.progress(f"building with {engine.title}, for at most {options.timeout:g} s"):
            result = build_engine(engine, inspection.model, job, folder, timeout=options.timeout)
        result = check_library(result, engine)
        _check_device(engine, result, request)
        built = result.state is BuildState.BUILT
        with request.progress("reading the engine"):
            kernels = engine.read_kernels(proto, folder) if built else ()
            placement = engine.read_placement(proto, folder) if built else None
            weights = judge_weights(engine, index, kernels, folder)
            saved = _copy_files(folder, result, engine, request.save)
            warnings = [*inspection.warnings, *guesses]
            if built:
                warnings += engine.list_warnings(folder)
    reduced = _reduce(engine, index, job, result, request) if options.reduce and not built else None
    if reduced and reduced.path:
        saved = (*saved, reduced.path)
    with request.progress("finding the kernels of nodes and pairs"):
        reasons = replace(reasons, placement=placement)
        nodes, sites = judge_model(index, inspection, kernels, reasons) if built else ((), ())
    requirements = [*_check_required(required, nodes), *_check_forbidden(options.forbid, nodes)]
    if options.require_int and built:
        requirements += _check_integers(engine, index, kernels, placement)
    proof = Proof(
        source=inspection.source,
        chosen=chosen,
        build=_describe_build(engine, index, job, result, reduced, saved),
        kernels=kernels,
        placement=placement,
        max_partitions=options.max_partitions,
        nodes=nodes,
        sites=sites,
        requirements=tuple(requirements),
        weights=weights,
        cost=_measure_cost(inspection.model, weights, request) if built else None,
        require_exact=options.require_exact,
        warnings=tuple(warnings),
    )
    if before is None:
        return proof
    return replace(proof, compared=options.compare, changes=tuple(find_changes(before, proof)))


def _find_engine(model: onnx.ModelProto, request: ProveRequest) -> tuple[Engine, str]:
    """The engine with its options, and why it is this one; "" where the caller named it."""
    options = request.options
    engine, chosen = (
        (find_engine(options.engine), "")
        if options.engine
        else choose_engine(model, options.compute_capability)
    )
    engine = engine.with_options(request.runtime)
    _check_saturation(engine, request)
    return engine, chosen


def _find_shapes(
    engine: Engine, index: GraphIndex, request: ProveRequest
) -> tuple[Profile, Cautions]:
    """The sizes to build for, and a warning of those that were guessed."""
    if engine.any_size:
        return {}, ()
    if engine.one_size:
        demand_sizes(index, request.shapes, engine.title)
    shapes, guessed = make_profile(index, request.shapes)
    return shapes, warn_guesses(shapes, guessed, "built for")


def _make_job(
    engine: Engine,
    capability: ComputeCapability,
    shapes: Profile,
    request: ProveRequest,
) -> Job:
    # A timing cache grows from build to build.
    cache = "" if request.save is None else str((request.save / _CACHE).resolve())
    return Job(
        capability=capability,
        shapes=shapes,
        cache=cache,
        operators=request.runtime.libraries,
        plugins=request.runtime.plugins,
        options=dict(engine.options),
    )


def _check_device(engine: Engine, result: BuildResult, request: ProveRequest) -> None:
    """Raise ConfigError where the library does not build for the device that was asked for."""
    if result.state is BuildState.NO_CAPABILITY:
        given = ", ".join(f"{name} {value}" for name, value in engine.options.items())
        raise ConfigError(
            given or f"compute capability {request.options.compute_capability}",
            result.reason,
            "choose one of these",
            code="Q304",
        )


def _measure_cost(
    model: ModelLike, weights: Sequence[WeightSums], request: ProveRequest
) -> SaturationCost | None:
    """Saturation on the samples, if there are any."""
    dataset = request.dataset
    if dataset is None:
        return None
    with request.progress("counting sums that saturate", len(dataset)) as task:
        found = measure_saturation(
            add_libraries(model, request.runtime.libraries),
            count_items(dataset.samples(), task),
            nodes=frozenset(one.node for one in weights if one.saturates),
            threads=request.options.threads,
        )
    return replace(found, data=dataset.describe(), synthetic=dataset.synthetic)


def choose_engine(proto: onnx.ModelProto, capability: str | None) -> tuple[Engine, str]:
    """The engine that a model is proved on when the caller names none, and why in a few words.

    capability: the device that was asked for; only one engine builds for a device that is not there.
    """
    if capability is not None:
        return find_usual_engine(), "a compute capability was given"
    plan = read_plan_note(proto)
    if plan is None:
        stored = {tensor.data_type for tensor in proto.graph.initializer}
        integers = not _UNREAD_TYPES.isdisjoint(stored) or any(
            node.op_type in INTEGER_OPERATORS for node in proto.graph.node
        )
        reason = (
            "no plan, but uint8, 16 bits or operators on integers"
            if integers
            else "the default: the file holds no plan"
        )
        return find_usual_engine(integers=integers), reason
    reason = f"the plan in the file is for {plan.target}"
    engines = find_backend(plan.target).engines
    return (engines[0], reason) if engines else (find_usual_engine(), f"the default: {reason}")


def _check_saturation(engine: Engine, request: ProveRequest) -> None:
    """Raise ConfigError where 16-bit sums are asked of an engine that has none."""
    exact = request.options.require_exact
    if engine.saturates or not (exact or request.dataset is not None):
        return
    fitting = [other for other in list_engines(foreign=False).values() if other.saturates]
    asked = "`require_exact=True`" if exact else "`data=…`"
    cause = f"is about kernels of {' or '.join(other.family for other in fitting)}; {engine.family}'s sums are exact"
    fix = f"take {' or '.join(f'`engine={other.name!r}`' for other in fitting)}"
    raise ConfigError(asked, cause, fix, code="Q317")


def _inspect_all_nodes(source: ModelSource) -> Inspection:
    """The model's pairs, with every node named and outside functions."""
    inspection = inspect_model(source)
    if inspection.model.functions:
        inspection = replace(
            inspect_model(inline_functions(inspection.model)), source=inspection.source
        )
    return inspection


def _check_types(types: Iterable[str], option: str) -> None:
    for dtype in types:
        if dtype not in TYPES:
            cause = "is no type that a kernel computes in or keeps weights in"
            raise ConfigError(f"{option}: {dtype}", cause, suggest_names(dtype, TYPES), code="Q312")


def _select_required(
    index: GraphIndex, wanted: Sequence[tuple[str, str]], reasons: Reasons
) -> tuple[Requirement, ...]:
    """The heavy nodes that each (type, pattern) selects, by name or operator; of types of weights those with a weight,
    of `quantized` those with pairs. None of them is met yet.

    Raises ConfigError for an unknown type, or a pattern that selects none.
    """
    _check_types((dtype for dtype, _ in wanted if dtype != QUANTIZED), "require")
    every = find_heavy_nodes(index)
    selects = {**dict.fromkeys(STORED, reasons.has_weight), QUANTIZED: reasons.is_quantized}
    required = []
    for dtype, pattern in wanted:
        subject = f"require: {pattern}"
        heavy = list(filter(selects.get(dtype), every))
        try:
            names = tuple(
                n.name for n in heavy if n.op_type == pattern or matches_any(pattern, n.name)
            )
        except re.error as error:
            raise ConfigError(
                subject, f"is not a regular expression: {error}", code="Q309"
            ) from error
        if not names:
            kinds = "products with pairs" if dtype == QUANTIZED else ", ".join(sorted(HEAVY))
            cause = f"matches none of the {len(heavy)} nodes that are judged ({kinds})"
            near = suggest_names(pattern, [node.name for node in heavy]) if heavy else ""
            raise ConfigError(subject, cause, near, code="Q309")
        required.append(Requirement(dtype=dtype, pattern=pattern, nodes=names, unmet=names))
    return drop_repeats(required)


def _check_required(
    required: Sequence[Requirement], nodes: Sequence[NodeProof]
) -> Iterator[Requirement]:
    for one in required:
        met = {proof.node for proof in nodes if proof.runs_in(one.dtype)}
        yield replace(one, unmet=tuple(name for name in one.nodes if name not in met))


def _check_forbidden(forbidden: Sequence[str], nodes: Sequence[NodeProof]) -> Iterator[Requirement]:
    # Engines add up a pool in float32 whatever the file says, and it costs next to nothing.
    computed = {one.node: one.computed for one in nodes if one.op in PRODUCTS}
    for dtype in drop_repeats(forbidden):
        unmet = tuple(name for name, types in computed.items() if dtype in types)
        yield Requirement(dtype=dtype, forbidden=True, nodes=tuple(computed), unmet=unmet)


def _check_integers(
    engine: Engine,
    index: GraphIndex,
    kernels: Kernels,
    placement: DevicePlacement | None,
) -> Iterator[Requirement]:
    """Every node that a kernel computes, on integers; none is left to the CPU."""
    # Pairs at the inputs and outputs of a model stay on the CPU by intention: the NPU reads
    # integers.
    pairs = {node.name for node in index.nodes if node.op_type in (QUANTIZE, DEQUANTIZE)}
    computed = {one.subject: False for one in placement.left} if placement is not None else {}
    for kernel in kernels:
        # Some kernels multiply integers and write floats, as MatMulIntegerToFloat does.
        whole = kernel.kind in engine.words.int8 or not any(
            "float" in tensor.dtype for tensor in (*kernel.inputs, *kernel.outputs)
        )
        # Conversions and copies compute nothing, whatever types they have.
        if not kernel.moves:
            computed.update(
                (name, whole and computed.get(name, True))
                for name in kernel.nodes
                if name not in pairs
            )
    unmet = tuple(name for name, whole in computed.items() if not whole)
    yield Requirement(dtype=INTEGERS, nodes=tuple(computed), unmet=unmet)


def _find_unquantized(proto: ModelLike) -> UnquantizedNodes:
    """The nodes that the plan inside the model left float; () when there is none or it cannot be read."""
    plan = read_plan_note(proto)
    return () if plan is None else plan.unquantized


def _describe_build(
    engine: Engine,
    index: GraphIndex,
    job: Job,
    result: BuildResult,
    reduced: Reduced | None,
    saved: Names,
) -> Build:
    blamed = index.named.get(result.node)
    return Build(
        engine=engine.name,
        version=engine.describe_version(),
        state=result.state,
        capability=".".join(map(str, job.capability)),
        seconds=result.seconds,
        engine_bytes=result.engine_bytes,
        reason=result.reason,
        node=result.node,
        fix=result.fix,
        log=result.log,
        shapes=job.shapes,
        options=job.options,
        reduced=reduced,
        saved=saved,
        # ONNX does not know its operator.
        needs_plugin=blamed is not None and not onnx.defs.has(blamed.op_type, blamed.domain),
    )


@contextmanager
def open_output_folder(folder: Path | None, engine: str | None, *, force: bool) -> Iterator[None]:
    """Open the user's folder for a build's results, none of which may be an input.

    engine: None where the model decides later. Raises OutputError when the folder cannot be written, or holds earlier
    results (unless force).
    """
    if folder is None:
        yield
        return
    # Before the build, which takes minutes: any engine's files may be those that are written.
    engines = list_engines().values() if engine is None else (find_engine(engine),)
    names = drop_repeats((*(name for one in engines for name in one.saved.values()), REDUCED))
    for name in names:
        if os.path.exists(folder / name) and not force:
            fix = "choose another folder, or use `force=True`"
            raise OutputError(folder / name, "exists", fix, code="Q601")
    with prepare_folder(folder, (*names, _CACHE), parents=True):
        yield


def _copy_files(folder: Path, result: BuildResult, engine: Engine, save: Path | None) -> Names:
    """Copy a build's files to the user's folder, if there is one; returns their paths there."""
    if save is None:
        return ()
    paths = []
    for name, own in engine.saved.items():
        # Of a build that failed only the log says anything.
        if os.path.exists(folder / name) and (result.state is BuildState.BUILT or name == LOG):
            copy_file(folder / name, save / own, overwrite=True)
            paths.append(str(save / own))
    return tuple(paths)


def _reduce(
    engine: Engine, index: GraphIndex, job: Job, whole: BuildResult, request: ProveRequest
) -> Reduced | None:
    """The smallest part that fails as the whole does, written to the user's folder if there is one."""
    timeout = min(request.options.timeout, _PART_SECONDS)

    def fails(part: ModelLike) -> bool:
        try:
            part_index = GraphIndex(part)
            known = {
                value.name: job.shapes[value.name]
                for value in part_index.inputs
                if value.name in job.shapes
            }
            shapes = make_profile(part_index, known)[0]
        except OnnxqError:  # sizes of its inputs cannot be guessed
            return False
        finally:
            task.advance()
        with ScratchFolder() as folder:
            # Without the user's timing cache, which such builds would fill with kernels of no use.
            result = build_engine(
                engine, part, replace(job, shapes=shapes, cache=""), folder, timeout=timeout
            )
        return fail_alike(result, whole)

    with request.progress(
        f"looking for the smallest part that fails, for at most {_REDUCE_SECONDS:g} s"
    ) as task:
        found = find_smallest_failure(index, fails, seconds=_REDUCE_SECONDS, hint=whole.node)
    if found is None:
        return None
    part, reduced = found
    if request.save is None:
        return reduced
    path = request.save / REDUCED
    save_model(part, path, overwrite=True)
    return replace(reduced, path=str(path))
