"""The command's own check: answers on held-back samples, and time beside the float model's."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, repeat

from onnx import TensorProto

from onnxq.arrays import ArrayDict, map_shapes
from onnxq.backends import find_backend, find_target, split_target
from onnxq.backends.base import WEIGHTED_OPS
from onnxq.backends.engine import Timing
from onnxq.data.synthetic import make_synthetic
from onnxq.engines.bench import time_placements
from onnxq.errors import ModelError, OnnxqError, VerificationError
from onnxq.evaluation.accumulator import OutputAccuracy
from onnxq.evaluation.agreement import AgreementSums, ChoiceAgreements, find_class_scores
from onnxq.evaluation.compare import (
    MatchedRunner,
    ModelErrors,
    ReferenceRunner,
    RunnerPair,
    compare_models,
)
from onnxq.evaluation.segments import compare_segments
from onnxq.evaluation.selections import explain_missing, find_selections
from onnxq.graph import GraphIndex, ModelLike, bare_proto, emulate_types, get_index, widen_model
from onnxq.graph.identity import index_named
from onnxq.graph.scopes import map_end_types
from onnxq.graph.storage import count_tensor_bytes
from onnxq.passes import LOST_DB, PlannedState, RunContext
from onnxq.plan import PlacementMethod, Plan
from onnxq.planner import EMBEDDING_ROWS, list_weighted
from onnxq.report.model import LatencyRatio, OpCount, OutputCheck
from onnxq.runtime import Feeds, KernelError, Latency, Session, detect_cpu, time_models
from onnxq.runtime.timing import PRECISION, convert_floats
from onnxq.sites import Caution, Cautions, Names

# Bytes of weights that a segment has at least, if there are so many: fewer sessions, each of which takes time.
_SEGMENT_BYTES = 1 << 26
# Beside the largest weight, small ones go into its segment.
_BESIDE = 1.25
# Samples, of which all tensors between two segments are in memory.
_MOST_SAMPLES = 4
# Rows of the summary: the worst segments.
_SHOWN = 3
# Of eight samples one is held back, which may be an easy one: three of four others were lost beside 22 dB.
_FEW = 4


@dataclass(frozen=True, eq=False)
class ModelCheck:
    """Float and quantized model side by side. segments: of which `outputs` has the worst; 0 for whole models.

    choices: of the float model, and how far the quantized one's are the same. errors: the sums behind `outputs`, with
    optimizations off ("off") and, where they can be trusted, on ("on").
    """

    outputs: tuple[OutputCheck, ...]
    samples: int
    notes: Cautions = ()
    segments: int = 0
    choices: ChoiceAgreements = ()
    errors: Mapping[str, ModelErrors] = field(default_factory=dict)


def check_model(
    before: ModelLike,
    after: ModelLike,
    samples: Iterable[Feeds],
    *,
    other_samples: Iterable[Feeds] = (),
    exact: ModelLike | None = None,
    threads: int = 0,
    optimized: bool = True,
    everywhere: bool = False,
) -> ModelCheck:
    """Compare outputs with ORT's optimizations off and on; the two runs of `after` are also compared with each other.

    other_samples: run where `samples` are too few to tell, or tell too little of others, as of a network that removes
    noise, where the strongest noise decides; they give no figures, but a note if answers are lost.
    exact: computes what `after` says, where ORT does not: in float32, rounded as its narrow types are.
    optimized: the file is for ORT, whose optimizations must take it. Else their columns are NaN. everywhere: they are
    run all the same, unless they refuse the file (FP8; the notes say so).
    Raises ModelError when ORT cannot load or run `after`, VerificationError as `load_file` does.
    """
    reference = ReferenceRunner(before, threads=threads)
    take_choices = reference.selections.take_choices
    file = Session(take_choices(after if exact is None else exact), optimize=False, threads=threads)
    plain = MatchedRunner(reference, file)
    rest = iter(samples)
    first = next(rest, None)
    notes = () if exact is None else load_file(after, first, optimized=optimized, threads=threads)
    pairs: dict[str, RunnerPair] = {"off": (reference, plain)}
    try:
        # ORT's optimizations say nothing of another engine. They misread pairs in narrow types, too
        # (WeightBiasQuantization multiplies float16 scales, which vanish).
        if optimized or everywhere:
            chosen = take_choices(after)
            typed = widen_model(chosen) if _holds_bfloat16(chosen) else chosen
            fast = MatchedRunner(reference, _TypedRunner(Session(typed, threads=threads)))
            pairs |= {"on": (reference, fast), "agree": (plain, fast)}
    except ModelError as error:
        if optimized:
            # The session above has loaded it.
            cause = f"ONNX Runtime's optimizations break the quantized model, which loads without them: {error.cause}"
            fix = "leave the products beside that node float with a rule, or take another version of onnxruntime"
            raise ModelError(error.subject, cause, fix, code="Q110") from error
        text = f"checked with ONNX Runtime's optimizations off only, they cannot take this file: {error.cause}"
        notes = (*notes, Caution("W116", text))
    ran: list[None] = []
    # The budget may end the samples early, so that only a count says how many there were.
    known = rest if first is None else chain((first,), rest)
    errors = compare_models(pairs, known, on_sample=lambda: ran.append(None))
    classes = find_class_scores(index_named(before))
    checks = make_checks(
        errors["off"], errors.get("on"), errors.pop("agree", None), classes=classes
    )
    if ran:
        missing = reference.selections.list_missing(after)
        unmatched = [Caution("W137", explain_missing(selection)) for selection in missing]
        notes = (*notes, *_note_unchecked(reference, errors["off"]), *unmatched)
    # Of the samples held back alone, before others are looked at.
    choices = plain.agreement.results()
    notes = (*notes, *_note_losses(checks, errors["off"], (reference, plain), other_samples))
    return ModelCheck(checks, len(ran), notes, choices=choices, errors=errors)


_NOTHING = OutputAccuracy(
    name="", sqnr_db=math.nan, whole_db=math.nan, cosine=math.nan, max_abs=math.nan
)


def make_checks(
    off: ModelErrors,
    on: ModelErrors | None,
    agree: ModelErrors | None,
    *,
    classes: Mapping[str, bool] | None = None,
) -> tuple[OutputCheck, ...]:
    """The figures of every output; NaN for runs that there are none of.

    classes: outputs that look like scores of classes, and whether they surely are.
    """
    checks = []
    runs = (repeat(_NOTHING) if errors is None else errors.results() for errors in (on, agree))
    for plain, fast, both in zip(off.results(), *runs, strict=False):
        check = OutputCheck(
            name=plain.name,
            sqnr_db=(plain.sqnr_db, fast.sqnr_db),
            whole_db=(plain.whole_db, fast.whole_db),
            parts=(plain.part, fast.part),
            cosine=(plain.cosine, fast.cosine),
            agreement_db=both.sqnr_db,
            optimized=on is not None,
        )
        if classes and plain.name in classes:
            top_1 = plain.top_k, fast.top_k
            check = replace(check, top_1=top_1, rows=plain.rows, classes=classes[plain.name])
        checks.append(check)
    return tuple(checks)


def check_segments(ctx: RunContext, state: PlannedState, model: ModelLike) -> ModelCheck:
    """Float and quantized model on a few samples, each segment on the float model's own values; the worst ones."""
    kinds = {state.types.computes, *state.types.interface.values()}
    precision = state.plan.precision
    if TensorProto.BFLOAT16 in kinds or (precision is not None and precision.type == "bfloat16"):
        # ONNX Runtime has next to no kernels for it, and takes none from numpy; float16 is run as it is.
        model = emulate_types(model)
    index = get_index(state.named)
    agreement = AgreementSums(find_selections(state.named))
    largest = max(map(count_tensor_bytes, bare_proto(state.named).graph.initializer), default=0)
    try:
        if ctx.samples is None:
            dataset = make_synthetic(
                index.inputs,
                samples=2,
                seed=ctx.config.data.seed,
                model=state.named,
                run=False,
            )
        else:
            dataset = ctx.samples.test
        samples = list(dataset.take(_MOST_SAMPLES).samples())
        segments = compare_segments(
            state.named,
            model,
            samples,
            limit=max(int(largest * _BESIDE), _SEGMENT_BYTES),
            agreement=agreement,
            threads=ctx.config.verify.threads,
            progress=ctx.progress,
        )
    except OnnxqError as error:
        if ctx.samples is not None:
            raise
        # Made-up inputs need not fit.
        text = (
            f"not checked against the float model, which made-up inputs do not fit: {error.fault}"
        )
        return ModelCheck((), 0, (Caution("W127", text),))
    checks = [
        check for errors in segments for check in make_checks(errors.off, errors.on, errors.agree)
    ]
    checks.sort(key=lambda check: min(check.sqnr_db))
    return ModelCheck(
        tuple(checks[:_SHOWN]), len(samples), segments=len(segments), choices=agreement.results()
    )


def is_narrow(state: PlannedState) -> bool:
    """True where ONNX Runtime does not compute as the file says: it rounds nothing to narrow types on the way."""
    return state.plan.precision is not None or bool(state.types.interface)


_EMULATED = "the file itself was not run, a check computes in float32 and rounds as its types say"


def load_file(
    model: ModelLike, feeds: Feeds | None = None, *, optimized: bool, threads: int = 0
) -> Cautions:
    """Load a finished file in ORT as it says: all its types must fit. A note where ORT has no kernel for one of them.

    feeds: a sample to run, since some kernels refuse a type only then. optimized: the file is for ORT, which must have
    all kernels and runs it anyway. Raises VerificationError for a file that is not legal.
    """
    try:
        session = Session(model, optimize=False, threads=threads)
    except KernelError as error:
        if optimized:
            raise
        text = f"ONNX Runtime has no kernel for {error.subject} in the file's types, which fit: {_EMULATED}"
        return (Caution("W116", text),)
    except ModelError as error:
        fix = "report this model; `high_precision='float32'` writes no other float types"
        raise VerificationError(
            "the quantized model", f"is not legal: {error.fault}", fix, code="Q701"
        ) from error
    if optimized or feeds is None or _holds_bfloat16(model):
        return ()
    try:
        _TypedRunner(session).run(feeds)
    except ModelError as error:
        return (Caution("W116", f"{error.subject} {error.cause.rstrip('.')}: {_EMULATED}"),)
    return ()


def _note_losses(
    checks: Sequence[OutputCheck],
    errors: ModelErrors,
    pair: RunnerPair,
    other_samples: Iterable[Feeds],
) -> Cautions:
    """A note for each output that is near the float model's on the samples held back and far from it on others."""
    near = {check.name for check in checks if not any(db < LOST_DB for db in check.sqnr_db)}
    if not near or (errors.count >= _FEW and errors.estimate().least_db >= LOST_DB):
        return ()
    return tuple(
        Caution(
            "W108",
            f"output {output.name!r} is far from the float model's ({output.sqnr_db:.1f} dB) on samples it was "
            f"calibrated with, though not on the {errors.count} held back, which are few: give more samples, or check "
            "the task's own metric",
        )
        for output in compare_models({"off": pair}, other_samples)["off"].results()
        if output.name in near and output.sqnr_db < LOST_DB
    )


class _TypedRunner:
    """A session that takes float32 in place of the narrower floats its inputs have."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def run(self, feeds: Feeds, /) -> ArrayDict:
        return self._session.run(convert_floats(feeds, self._session.inputs))


def _holds_bfloat16(model: ModelLike) -> bool:
    """True for a model with inputs or outputs in bfloat16, which ORT neither takes from numpy nor gives to it."""
    return TensorProto.BFLOAT16 in map_end_types(model.graph).values()


def _note_unchecked(reference: ReferenceRunner, errors: ModelErrors) -> Iterator[Caution]:
    """A note for each output of which some samples have no number to compare, and which no choice decides."""
    selections = reference.selections
    checked = selections.settled.union(
        name for node in selections.nodes for name, _ in node.choices
    )
    for output in reference.session.native.get_outputs():
        sums = errors.outputs.get(output.name)
        label = f"output {output.name!r}"
        if sums is None and output.name not in checked:
            cause = "was not checked: it holds no numbers to compare with the float model's"
            yield Caution("W120", f"{label}, {output.type}, {cause}")
        elif sums is not None and sums.nans:
            cause = f"is NaN in {sums.nans} values, with which nothing can be compared"
            yield Caution("W120", f"{label} of the float model {cause}")


def explain_slowness(plan: Plan, title: str) -> str:
    """Why a model quantized by this plan can be slower than float, and what helps, as far as the plan says.

    title: of the engine.
    """
    if plan.precision is not None:
        return (
            f"{title} computes little in {plan.precision.type} on the CPU, and converts around it: "
            "leave `high_precision='float32'` where only the CPU runs it"
        )
    data = [site for site in plan.all_sites if site.role.is_measured]
    if not data:
        if all(site.rule == EMBEDDING_ROWS for site in plan.all_sites):
            return "tables alone are quantized, which saves bytes and no time; `embeddings='float'` leaves them"
        text = (
            "weights alone are quantized, which saves bytes and not arithmetic: it pays where few positions are "
            "computed at a time; `bench` times other shapes, and `mode: static` computes in integers"
        )
        shared = any(len(site.named_consumers) > 1 for site in plan.sites)
        if shared and find_target(plan.target).times_itself:
            text += (
                f"; {title} has a kernel for weights that one node reads: with `emit: nbits` and "
                "`weights: {granularity: block}` others have it, too"
            )
        return text
    text = "what runs in integers saves less than quantizing and dequantizing costs on this machine"
    if any(site.spec.dynamic for site in data):
        return f"{text}; scales that stand in the file (`mode: static`) cost less than those of each run"
    if plan.placement is not None and plan.placement.method is PlacementMethod.MEASURED:
        return f"{text} at this shape and moment, though it was the fastest of the placements timed"
    if len(split_target(plan.target)) > 1:
        return f"{text}; a file for this engine alone may be placed better"
    return f"{text}; `placement='measured'` looks for a faster placement of int8 pairs"


# Models by name, one sample and a number of rounds, None for as many as the seconds take -> the latency of each model
# that the engine takes.
Timer = Callable[[Mapping[str, ModelLike], Feeds, int | None], Mapping[str, Latency]]


def find_timer(
    target: str,
    threads: int,
    plugins: Names,
    seconds: float = Timing.seconds,
    precision: float = PRECISION,
) -> Timer | None:
    """The times of a target's engine on this machine's CPU; None where it has none here, and for a GPU's."""
    backend = find_backend(target)
    if backend.usual.times_itself:
        return lambda models, feeds, rounds: time_models(
            models,
            feeds,
            threads=threads,
            rounds=rounds,
            seconds=seconds,
            precision=precision,
        )
    local = backend.local
    if local is None or not local.judges or local.emulated or local.find_obstacle() is not None:
        return None
    return lambda models, feeds, rounds: time_placements(
        target, models, feeds, rounds, seconds=seconds, plugins=plugins, threads=threads
    )


def time_both(
    before: ModelLike,
    after: ModelLike,
    feeds: Feeds,
    timer: Timer,
    *,
    own: ModelLike | None = None,
    threads: int,
    reason: str = "",
) -> LatencyRatio | None:
    """Interleaved medians of float and int8 on one sample; None where the engine does not take both.

    timer: of the engine. own: the model as it is made for this engine alone. threads: those that it takes. reason: why
    int8 would be slower, told where it is.
    """
    try:
        others = {} if own is None else {"own": own}
        latencies = timer({"float": before, "int8": after, **others}, feeds, None)
        slow = latencies["float"]
        fast = latencies["int8"]
    except (VerificationError, KeyError):
        # The check on the engine gives the cause.
        return None
    # The median of the ratios round by round: a busy moment hits both models of a round alike.
    ratio = fast.speedup(slow)
    if ratio < 1:
        # On a busy machine medians may be chance: slower is what the least times call so, too.
        ratio = max(ratio, min(slow.min_ms / fast.min_ms, 1.0))
    # The first axis of the first input that has one: what else is a batch, the model does not say.
    batch = next((int(value.shape[0]) for value in feeds.values() if value.ndim), 1)
    # In models of sequences it may be time.
    if batch > 1 and any(
        node.op_type in ("LSTM", "GRU", "RNN") for node in get_index(before).nodes
    ):
        batch = 0
    apart = latencies.get("own")
    # By medians or by minima, whichever says less: of a small model at a busy moment a median may be chance.
    share = math.nan if apart is None else max(fast.speedup(apart), apart.min_ms / fast.min_ms)
    int8_ms = slow.median_ms / ratio
    return LatencyRatio(
        float_ms=slow.median_ms,
        int8_ms=int8_ms,
        threads=threads,
        shapes=map_shapes(feeds),
        batch=batch,
        cpu=detect_cpu(),
        reason=reason if ratio < 1 else "",
        own_ms=int8_ms * share,
    )


# Operators that some target quantizes.
_HEAVY = (
    *WEIGHTED_OPS,
    *("Add", "Mul", "Concat", "MaxPool", "AveragePool", "GlobalAveragePool"),
    *("Einsum", "LeakyRelu", "Resize"),
)


def count_ops(index: GraphIndex, plan: Plan) -> tuple[OpCount, ...]:
    """How many nodes of each operator compute on quantized inputs, of all in the prepared model."""
    # What is left float may read pairs of other operators.
    int8 = _find_quantized_nodes(index, plan).difference(left.subject for left in plan.unquantized)
    rows = []
    for op in _HEAVY:
        nodes = [node.name for node in index.nodes if node.op_type == op]
        done = sum(name in int8 for name in nodes)
        if nodes and (done or op in WEIGHTED_OPS):
            rows.append(OpCount(op=op, quantized=done, total=len(nodes)))
    return tuple(rows)


def _find_quantized_nodes(index: GraphIndex, plan: Plan) -> set[str]:
    """Nodes whose float operands all come through a pair."""
    read = {edge for site in plan.all_sites for edge in site.find_readers(index)}
    quantized = list_weighted(plan.all_sites)
    for node in index.nodes:
        data = [node.make_edge(k) for k in index.list_computed(node)]
        # One computed operand beside a weight that stayed float: half quantized is not quantized.
        half = node.op_type in WEIGHTED_OPS and len(data) < 2
        if data and not half and read.issuperset(data):
            quantized.add(node.name)
    return quantized
