"""The record of a quantized model: its pairs switched on and off, its kernels, and the values of its tensors."""

import hashlib
import math
import platform
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto

from onnxq.annotate import PairInfo, find_pairs, read_plan_note
from onnxq.arrays import Arrays, Interval, as_float64, map_shapes
from onnxq.backends import find_backend, find_engine, find_reference, list_runnable, load_config
from onnxq.config import Config, ProveConfig, change_fields, drop_unset
from onnxq.data import Dataset, load_data
from onnxq.engines.diff.compare import compare_models
from onnxq.engines.diff.model import FLOAT, OFF, Difference, label_runs
from onnxq.engines.prove.proof import UNSEEN, NodeProof, Proof
from onnxq.engines.prove.prove import ProveRequest, prove_model
from onnxq.errors import MissingDependencyError
from onnxq.evaluation.accumulator import db_to_noise
from onnxq.evaluation.distributions import observe_distributions
from onnxq.evaluation.sensitivity import GroupCost, Profile, measure_sensitivity
from onnxq.files import write_text
from onnxq.graph import GraphIndex, ModelLike, ModelSource, get_index, name_file
from onnxq.graph.base import DEQUANTIZE, QUANTIZE, MaybeNode, NodeRef
from onnxq.graph.light import measure_size
from onnxq.passes import FloatState, RunContext
from onnxq.pipeline.both_models import load_both
from onnxq.pipeline.configuration import OutputPath, name_model, open_crew
from onnxq.pipeline.finalize import Result, count_bytes
from onnxq.planner import state_placement
from onnxq.planner.choose import compare_times, predict_times
from onnxq.progress import Progress
from onnxq.report import page
from onnxq.report.model import list_figures, make_verdict
from onnxq.report.record import (
    Advice,
    Figures,
    Measured,
    OperatorRecord,
    OutputRecord,
    ReportRecord,
    SiteRecord,
    ValueBars,
    bound_db,
)
from onnxq.runtime import detect_cpu, observe_shapes
from onnxq.sites import MaybeTensor, Names, TensorId
from onnxq.workers import use_threads

# Values of an output that are drawn.
_POINTS = 200
# Types of shapes, indices and conditions.
_COUNTS = (TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL)
# Bits of a float weight.
_FLOAT_BITS = 32
_HASH = 16
# Of what the profile has no figures for.
_NO_COST = GroupCost(
    kind="",
    name="",
    ops=(),
    sites=(),
    isolated_db=math.nan,
    leave_one_out_db=math.nan,
    gain_db=math.nan,
)
# dB that more operators in float must bring back to be advised.
_GAIN_DB = 0.5


def write_forms(record: ReportRecord, config: Config, out: OutputPath, force: bool) -> None:
    """Write the page and the other forms that the configuration asks for."""
    options = config.report
    for path, write in (
        (out, page.write_page),
        (options.markdown, page.write_markdown),
        (options.mermaid, page.write_mermaid),
        (options.node_data, page.write_node_data),
        (options.graph, page.write_graph),
    ):
        if path:
            write_text(Path(path), write(record), overwrite=force)


def describe_result(
    model: ModelSource, result: Result, data: object, config: Config, progress: Progress
) -> ReportRecord:
    """The record of a run of `quantize`, with what its passes did."""
    report = result.report
    # The file, where there is one: its size and hash are report.
    record = measure_record(model, report.output or result.model, data, config, progress)
    latency = report.latency
    speed = None if latency is None or math.isnan(latency.ratio) else round(latency.ratio, 3)
    return replace(
        record,
        quantized=report.output or f"quantized as {report.config or report.target} says",
        speed=speed,
        passes=report.accounts,
        refusals=report.refusals,
        left_float=report.left_float,
        provenance={**record.provenance, "configuration": report.config or report.target},
        warnings=(*record.warnings, *map(str, report.warnings), *map(str, report.alarms())),
    )


def write_run(
    model: ModelSource,
    result: Result,
    data: object,
    config: Config,
    force: bool,
    progress: Progress,
    **more: Any,
) -> None:
    """Measure and write the page of a run. more: fields of its record."""
    with progress("measuring for the report"):
        record = replace(describe_result(model, result, data, config, progress), **more)
    write_forms(record, config, config.output.report, force)


@dataclass(frozen=True, eq=False)
class _Measured:
    """All that a record is made of."""

    state: FloatState
    quantized: ModelLike
    samples: Dataset
    profile: Profile
    difference: Difference
    proof: Proof
    # By output: of the first sample, of the float model and of the file.
    float_outputs: Arrays
    file_outputs: Arrays

    @property
    def index(self) -> GraphIndex:
        """The float model's index."""
        return get_index(self.state.model)

    @cached_property
    def pairs(self) -> list[tuple[PairInfo, MaybeTensor]]:
        """The pairs of the file, each with the float tensor that it quantizes."""
        pairs = find_pairs(self.quantized)
        return [(pair, _name_tensor(pair, self.index.named)) for pair in pairs]

    @cached_property
    def weight_bits(self) -> dict[MaybeTensor, int]:
        """The bits of each quantized weight."""
        return {tensor: pair.bits for pair, tensor in self.pairs if pair.role.is_weight}


def measure_record(
    model: ModelSource, quantized: ModelSource, data: object, config: Config, progress: Progress
) -> ReportRecord:
    """The record of a quantized model, by any tool, beside the float one that it was made from."""
    with progress("reading the models"):
        ctx = RunContext(config=Config(runtime=config.runtime), progress=progress)
        state, proto = load_both(model, ctx, quantized)
    samples = load_data(data, state.before.inputs, config.data, state.named, progress=progress)
    samples = samples.take(config.report.samples, config.data.seed)
    proof = _prove(quantized, proto, samples, config, progress)
    with use_threads(config.scale.threads), open_crew(config.scale, model) as crew:
        profile = measure_sensitivity(
            state.model,
            proto,
            samples,
            kinds=("node", "site"),
            threads=config.verify.threads,
            crew=crew,
            progress=progress,
        )
    # The engine that was proved answers, too, where it can.
    proved = {proof.build.engine} if proof.built else set()
    engines = dict.fromkeys([find_reference().name, *proved.intersection(list_runnable())])
    diff = change_fields(config.diff, layers=True, engines=tuple(engines))
    chosen = change_fields(config, diff=diff)
    compared = compare_models(state.named, proto, samples, chosen, keep=1, progress=progress)
    # One sample has enough values for a picture.
    exact, answers = (compared.recorder.outputs[run][0]["outputs"] for run in (FLOAT, OFF))
    measured = _Measured(
        state=state,
        quantized=proto,
        samples=samples,
        profile=profile,
        difference=compared.difference,
        proof=proof,
        float_outputs=exact,
        file_outputs=answers,
    )
    return _make_record(measured, model, quantized, config, progress)


def _prove(
    quantized: ModelSource,
    proto: ModelLike,
    samples: Dataset,
    config: Config,
    progress: Progress,
) -> Proof:
    """The kernels of the engine asked for, else of the plan's, else of ONNX Runtime, at the first sample's sizes."""
    note = read_plan_note(proto)
    engines = (find_backend(note.target).engines if note else ()) or find_reference().engines
    options = ProveConfig(engine=config.report.engine or engines[0].name)
    sizes = {name: (shape,) * 3 for name, shape in map_shapes(samples[0]).items()}
    request = ProveRequest(options=options, runtime=config.runtime, shapes=sizes, progress=progress)
    try:
        return prove_model(quantized, request)
    except MissingDependencyError:
        if config.report.engine:
            raise
    options = ProveConfig(engine=find_reference().engines[0].name)
    return prove_model(quantized, replace(request, options=options))


def _make_record(
    measured: _Measured,
    model: ModelSource,
    quantized: ModelSource,
    config: Config,
    progress: Progress,
) -> ReportRecord:
    profile = measured.profile
    difference = measured.difference
    proof = measured.proof
    sites = tuple(_list_sites(measured, progress))
    nodes = tuple(_list_nodes(measured))
    figures = list(list_figures(difference))
    grade, verdict = make_verdict(figures, profile.choices)
    origin = {package: version(package) for package in ("onnxq", "onnx", "numpy")}
    engine = find_engine(proof.build.engine).title
    origin[engine] = proof.build.version
    origin |= {"python": platform.python_version(), "CPU": detect_cpu() or platform.machine()}
    for name, source in (("float model", model), ("quantized model", quantized)):
        if isinstance(source, (str, Path)):
            digest = hashlib.sha256(Path(source).read_bytes()).hexdigest()[:_HASH]
            origin[name] = f"{source}, sha256 {digest}"
    origin["seed"] = str(config.data.seed)
    warnings = [*profile.warnings, *proof.warnings, *difference.notes]
    if not proof.built:
        warnings.append(f"{engine} shows no kernels: {proof.build.state}: {proof.build.reason}")
    return ReportRecord(
        title=name_model(model),
        quantized=name_file(quantized),
        grade=grade.name,
        verdict=verdict,
        data=measured.samples.describe(),
        samples=len(measured.samples),
        synthetic=measured.samples.synthetic,
        source_bytes=measure_bytes(model),
        quantized_bytes=measure_bytes(quantized),
        sqnr_db=bound_db(min((figure.sqnr_db for figure in figures), default=math.nan)),
        engine=engine if proof.built else "",
        types=Counter(node.type for node in nodes if node.type),
        outputs=tuple(_list_outputs(measured)),
        nodes=nodes,
        sites=sites,
        advice=tuple(_list_advice(measured, config)),
        refusals=difference.skipped,
        warnings=tuple(map(str, warnings)),
        provenance=origin,
    )


def measure_bytes(source: ModelSource) -> int:
    """The size of a model, of a file with the weights beside it."""
    if isinstance(source, (str, Path)):
        return count_bytes(Path(source))
    return measure_size(source)


def _list_outputs(measured: _Measured) -> Iterator[OutputRecord]:
    """Each output's figures, and values of the first sample."""
    runs = label_runs(measured.difference)
    runs_of_sample = (measured.float_outputs, measured.file_outputs)
    for output in measured.difference.outputs:
        figures = {
            runs.get(error.run, error.run): bound_db(error.sqnr_db) for error in output.accuracy
        }
        exact, answers = (_pick_values(values.get(output.name)) for values in runs_of_sample)
        if len(exact) != len(answers):
            exact = answers = ()
        yield OutputRecord(
            name=output.name,
            runs=drop_unset(figures),
            float_values=exact,
            values=answers,
        )


def _pick_values(values: Any) -> Figures:
    """So many values, evenly spread; () of what is not numbers."""
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "fiu" or not values.size:
        return ()
    flat = values.ravel()
    picked = flat[np.linspace(0, flat.size - 1, min(_POINTS, flat.size)).astype(np.intp)]
    return tuple(float(f"{value:.4g}") for value in np.nan_to_num(as_float64(picked)))


def _list_nodes(measured: _Measured) -> Iterator[OperatorRecord]:
    """The operators that compute on data, those of bodies too, in the order they run."""
    index = measured.index
    profile = measured.profile
    costs = {cost.name: cost for cost in profile.of("node")}
    # A node that reads one site alone shares its figures with others that read it.
    noises = {name: _read_noise(cost) for name, cost in costs.items()}
    total = sum(noises.values()) or 1.0
    prefixes = {prefix.node: prefix.sqnr_db for prefix in profile.prefixes}
    # By node: the kind of its kernel and the type of its results; and the conversions and copies in front, which count
    # for the next kernel that computes.
    kernels: dict[str, tuple[str, str]] = {}
    moves = Counter[str]()
    waiting = 0
    for kernel in measured.proof.kernels:
        if kernel.moves or not kernel.nodes:
            waiting += kernel.moves
            continue
        dtype = kernel.outputs[0].dtype if kernel.outputs else ""
        for name in kernel.nodes:
            kernels.setdefault(name, (kernel.kind, dtype))
        moves[kernel.nodes[0]] += waiting
        waiting = 0
    proofs = {node.node: node for node in measured.proof.nodes}
    own = {
        layer.name: error.sqnr_db
        for layer in measured.difference.layers
        for error in layer.accuracy
        if error.run == OFF
    }
    for node in sorted(index.nodes, key=lambda node: node.order):
        constant = all(map(index.is_constant, node.results))
        # Shapes and indices are computed in integers that nobody rounds.
        counts = all(index.find_dtype(result) in _COUNTS for result in node.results)
        if constant or counts or node.op_type in (QUANTIZE, DEQUANTIZE, "Constant"):
            continue
        name = node.name
        cost = costs.get(name, _NO_COST)
        proved = proofs.get(name, NodeProof(node=name, op=node.op_type, type=UNSEEN))
        kind, dtype = kernels.get(name, ("", ""))
        yield OperatorRecord(
            name=name,
            op=node.op_type,
            inputs=tuple(tensor.name for tensor in index.list_computed(node).values()),
            outputs=tuple(filter(None, node.outputs)),
            type=dtype if proved.type == UNSEEN else proved.type,
            kernel=proved.kind or kind,
            moves=moves[name],
            share=round(noises.get(name, 0.0) / total, 5),
            isolated_db=bound_db(cost.isolated_db),
            left_out_db=bound_db(cost.leave_one_out_db),
            gain_db=bound_db(cost.gain_db),
            cumulative_db=bound_db(prefixes.get(name, math.nan)),
            own_db=bound_db(own.get(node.outputs[0], math.nan)),
            reason=proved.reason,
            sites=cost.sites,
        )


def _read_noise(cost: GroupCost) -> float:
    """The noise at the outputs relative to the signal, with this group alone quantized."""
    return db_to_noise(cost.isolated_db) if cost.isolated_db > -math.inf else 1.0


def _list_sites(measured: _Measured, progress: Progress) -> Iterator[SiteRecord]:
    """The quantized tensors in the file's order, with the distributions of their float values."""
    costs = {cost.sites[0]: cost for cost in measured.profile.groups if len(cost.sites) == 1}
    quantized = get_index(measured.quantized)
    pairs = measured.pairs
    float_values = observe_distributions(measured.state.model, pairs, measured.samples, progress)
    for pair, tensor in pairs:
        cost = costs.get(pair.name, _NO_COST)
        values = float_values.get(tensor)
        # Operators on integers are read as pairs that the file itself does not have.
        node = quantized.named.get(pair.dequantize) or quantized.named.get(pair.quantize)
        reach = _find_reach(pair, node, quantized)
        bars = None
        clipped = None
        if values is not None and values.counted:
            low, high, counts = values.count_bars()
            bars = ValueBars(low=float(f"{low:.5g}"), high=float(f"{high:.5g}"), counts=counts)
            clipped = round(values.measure_clipped(reach), 5) if reach else None
        yield SiteRecord(
            name=pair.name,
            role=pair.role.value,
            readers=pair.ops,
            bits=pair.bits,
            type=pair.storage,
            scheme=pair.scheme,
            granularity=pair.granularity.word,
            scales=tuple(float(f"{scale:.4g}") for scale in pair.scale_range),
            range=tuple(float(f"{end:.5g}") for end in reach),
            clipped=clipped,
            isolated_db=bound_db(cost.isolated_db),
            left_out_db=bound_db(cost.leave_one_out_db),
            values=bars,
            channels=values.list_channels() if values is not None else (),
            levels=None if values is None else _count_levels(pair, values.find_middle(), reach),
        )


def _count_levels(pair: PairInfo, middle: Measured, reach: Interval | tuple[()]) -> Measured:
    """How many levels a channel of this magnitude has. Of weights it is a share of the largest of their output."""
    if middle is None:
        return None
    if pair.role.is_weight:
        return round(middle * float(2 ** (pair.bits - 1)), 1)
    return round(middle / max(map(abs, reach)) * float(2**pair.bits), 1) if reach else None


def _name_tensor(pair: PairInfo, nodes: Mapping[str, NodeRef]) -> MaybeTensor:
    """The float tensor that a pair quantizes. nodes: of the float model, by name."""
    site = pair.site
    if isinstance(site, TensorId):
        return site
    node = nodes.get(site.node)
    if node is None or site.index >= len(node.inputs):
        return None
    return TensorId(node.inputs[site.index], site.scope)


def _find_reach(pair: PairInfo, node: MaybeNode, index: GraphIndex) -> Interval | tuple[()]:
    """The smallest and largest value that the pair's integers stand for; () where they have several scales."""
    if pair.scales != 1 or pair.storage.startswith("float") or node is None:
        return ()
    zero = index.input_value(node, 2)
    shift = 0 if zero is None else int(zero.ravel()[0])
    low = -(2 ** (pair.bits - 1)) if pair.element_type.signed else 0
    return (low - shift) * pair.scale_min, (low + 2**pair.bits - 1 - shift) * pair.scale_min


def _list_advice(measured: _Measured, config: Config) -> Iterator[Advice]:
    """Rules that leave the loudest operators float, as far as more of them bring more."""
    profile = measured.profile
    best = profile.sqnr_db + _GAIN_DB
    costs = _predict_costs(measured, [joint.nodes for joint in profile.joint], config)
    # From few operators to many: each further step must bring more than the one before.
    for joint in profile.joint:
        # A node that the exporter did not name is called after its output, which other tools rename: no rule finds it.
        unknown = set(joint.nodes).difference(measured.index.named)
        if joint.sqnr_db < best or unknown:
            continue
        best = joint.sqnr_db + _GAIN_DB
        size = sum(_count_growth(measured, name) for name in joint.nodes)
        gain = bound_db(joint.sqnr_db - profile.sqnr_db) or 0.0
        yield Advice(
            nodes=joint.nodes,
            rule=f"rules:\n  {joint.rule}",
            gain_db=gain,
            size=size,
            cost=costs.get(joint.nodes),
        )


def _count_growth(measured: _Measured, name: str) -> int:
    """The bytes that the weights of an operator grow by in float."""
    index = measured.index
    node = index.find_node(name)
    bits = measured.weight_bits
    growth = 0
    for tensor in (index.resolve_tensor(name, node.scope) for name in node.inputs):
        weight = index.find_constant(tensor) if tensor in bits else None
        growth += 0 if weight is None else weight.size * (_FLOAT_BITS - bits[tensor]) // 8
    return growth


def _predict_costs(
    measured: _Measured, groups: Sequence[Names], config: Config
) -> dict[Names, float]:
    """The change of the model's time with each group in float, as a share; {} where no times are predicted."""
    note = read_plan_note(measured.quantized)
    if note is not None and note.target != config.target:
        config = load_config(target=note.target)
    if not groups or not find_backend(config.target).usual.costs:
        return {}
    shapes = observe_shapes(measured.state.model, measured.samples.take(1, 0).samples())
    problem = state_placement(measured.state.model, config, shapes=shapes, identified=False)
    costs = measured.profile.of("node")
    quantized = frozenset(cost.name for cost in costs if cost.name in problem.ops.by_name)
    before = predict_times(problem, quantized)
    return {
        names: round(
            compare_times(before, predict_times(problem, quantized.difference(names))) - 1, 4
        )
        for names in groups
    }
