"""The command's own check: answers on held-back samples, and time beside the float model's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
from onnx import TensorProto, helper

from onnxq.errors import ModelError, VerificationError
from onnxq.evaluation.accumulator import Array, OutputAccuracy
from onnxq.evaluation.agreement import ChoiceAgreement
from onnxq.evaluation.class_scores import find_class_scores
from onnxq.evaluation.compare import ModelErrors, Runner, compare_models, sum_errors
from onnxq.evaluation.float_outputs import MatchedRunner, ReferenceRunner
from onnxq.evaluation.selections import explain_missing
from onnxq.graph import GraphIndex, ModelLike, get_index, index_named
from onnxq.graph.precision.widen import widen_model
from onnxq.passes.journal import LOST_DB
from onnxq.passes.state import PlannedState
from onnxq.plan import PlacementMethod, Plan
from onnxq.report import Latency, OpCount, OutputCheck
from onnxq.runtime import KernelError, Session, detect_cpu, time_models
from onnxq.sites import Caution, Role


@dataclass(frozen=True, eq=False)
class ModelCheck:
    """Float and quantized model side by side. segments: of which `outputs` has the worst; 0 for whole models.

    choices: of the float model, and how far the quantized one's are the same. errors: the sums behind `outputs`, with
    optimizations off ("off") and, where they can be trusted, on ("on").
    """

    outputs: tuple[OutputCheck, ...]
    samples: int
    notes: tuple[Caution, ...] = ()
    segments: int = 0
    choices: tuple[ChoiceAgreement, ...] = ()
    errors: Mapping[str, ModelErrors] = field(default_factory=dict)


def check_model(
    before: ModelLike,
    after: ModelLike,
    samples: Iterable[Mapping[str, Array]],
    *,
    few: Iterable[Mapping[str, Array]] = (),
    exact: ModelLike | None = None,
    threads: int = 0,
    optimized: bool = True,
    everywhere: bool = False,
) -> ModelCheck:
    """Compare outputs with ORT's optimizations off and on; the two runs of `after` are also compared with each other.

    few: other samples, where `samples` are too few to tell; they give no figures, but a note if answers are lost.
    exact: computes what `after` says, where ORT does not: in float32, rounded as its narrow types are.
    optimized: the file is for ORT, whose optimizations must take it. Else, where they refuse it (FP8; the notes say so)
    or cannot be trusted, their columns are NaN. everywhere: they are run though they cannot.
    Raises ModelError when ORT cannot load or run `after`, VerificationError as `load_file` does.
    """
    reference = ReferenceRunner(before, threads=threads)
    take_choices = reference.selections.take_choices
    file = Session(take_choices(after if exact is None else exact), optimize=False, threads=threads)
    fast = plain = MatchedRunner(reference, file)
    rest = iter(samples)
    first = next(rest, None)
    notes = () if exact is None else load_file(after, first, optimized=optimized, threads=threads)
    # ORT's optimizations misread pairs in narrow types (WeightBiasQuantization multiplies float16 scales, which
    # vanish): they say nothing of another engine.
    without = exact is not None and not (optimized or everywhere)
    try:
        fast = plain if without else MatchedRunner(reference, _open_typed(take_choices(after), threads))
    except ModelError as error:
        if optimized:
            # The session above has loaded it.
            cause = f"ONNX Runtime's optimizations break the quantized model, which loads without them: {error.cause}"
            fix = "leave the products beside that node float with a rule, or take another version of onnxruntime"
            raise ModelError(error.subject, cause, fix, code="Q110") from error
        text = f"checked with ONNX Runtime's optimizations off only, they cannot take this file: {error.cause}"
        notes, without = (*notes, Caution("W116", text)), True
    ran: list[None] = []
    exact_run: Runner = reference
    pairs = {"off": (exact_run, plain), "on": (exact_run, fast), "agree": (plain, fast)}
    # The budget may end the samples early, so that only a count says how many there were.
    known = rest if first is None else chain((first,), rest)
    sums = sum_errors(pairs, known, on_sample=lambda: ran.append(None))
    found = {label: errors.results() for label, errors in sums.items()}
    count, choices = len(ran), plain.agreement.results()
    classes = find_class_scores(index_named(before))
    rows = zip(found["off"], found["on"], found["agree"], strict=True)
    checks = tuple(_make_check(off, None if without else on, agree, classes) for off, on, agree in rows)
    on_others = compare_models({"off": (reference, plain)}, few)["off"]
    unchecked = _note_unchecked(reference, checks) if count else ()
    lacking = reference.selections.list_missing(after) if count else ()
    unmatched = (Caution("W137", explain_missing(one)) for one in lacking)
    notes = (*notes, *unchecked, *unmatched, *_note_losses(checks, on_others, count))
    errors = {label: sums[label] for label in (("off",) if without else ("off", "on"))}
    return ModelCheck(checks, count, notes, choices=choices, errors=errors)


def _make_check(
    off: OutputAccuracy, on: OutputAccuracy | None, agree: OutputAccuracy, classes: Mapping[str, bool]
) -> OutputCheck:
    """The figures of one output. on: with optimizations, where they can be trusted; NaN stands for them elsewhere."""
    unknown = math.nan, math.nan
    return OutputCheck(
        name=off.name,
        sqnr_db=(off.sqnr_db, on.sqnr_db if on else math.nan),
        whole_db=(off.whole_db, on.whole_db if on else math.nan),
        parts=(off.part, on.part if on else ""),
        cosine=(off.cosine, on.cosine if on else math.nan),
        agreement_db=agree.sqnr_db if on else math.nan,
        optimized=on is not None,
        top_1=(off.top_k, on.top_k if on else math.nan) if off.name in classes else unknown,
        rows=off.rows if off.name in classes else 0,
        classes=classes.get(off.name, False),
    )


def is_narrow(state: PlannedState) -> bool:
    """True where ONNX Runtime does not compute as the file says: it rounds nothing to narrow types on the way."""
    return state.planned.precision is not None or bool(state.types.interface)


_EMULATED = "the file itself was not run, a check computes in float32 and rounds as its types say"


def load_file(
    model: ModelLike, feeds: Mapping[str, Array] | None = None, *, optimized: bool, threads: int = 0
) -> tuple[Caution, ...]:
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
            "the quantized model", f"is not legal: {error.subject}: {error.cause}", fix, code="Q701"
        ) from error
    if optimized or feeds is None or _holds_bfloat16(model):
        return ()
    try:
        _TypedRunner(session).run(feeds)
    except ModelError as error:
        return (Caution("W116", f"{error.subject} {error.cause.rstrip('.')}: {_EMULATED}"),)
    return ()


def _note_losses(checks: Sequence[OutputCheck], others: Sequence[OutputAccuracy], samples: int) -> tuple[Caution, ...]:
    """A note for each output that is near the float model's on the samples held back and far from it on others."""
    near = {check.name for check in checks if check.sqnr_db[0] >= LOST_DB}
    return tuple(
        Caution(
            "W108",
            f"output {found.name!r} is far from the float model's ({found.sqnr_db:.1f} dB) on samples it was "
            f"calibrated with, though not on the {samples} held back, which are few: give more samples, or check the "
            "task's own metric",
        )
        for found in others
        if found.name in near and found.sqnr_db < LOST_DB
    )


class _TypedRunner:
    """A session that takes float32 in place of the narrower floats its inputs have."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._types = {one.name: helper.tensor_dtype_to_np_dtype(one.dtype) for one in session.inputs if one.dtype}

    def run(self, feeds: Mapping[str, Array], /) -> dict[str, Array]:
        return self._session.run({name: self._convert(name, value) for name, value in feeds.items()})

    def _convert(self, name: str, value: Array) -> Array:
        return value.astype(self._types[name]) if value.dtype == np.float32 and name in self._types else value


def _open_typed(model: ModelLike, threads: int) -> Runner:
    """The model as ORT runs it, for float32 samples."""
    return _TypedRunner(Session(widen_model(model) if _holds_bfloat16(model) else model, threads=threads))


def _holds_bfloat16(model: ModelLike) -> bool:
    """True for a model with inputs or outputs in bfloat16, which ORT neither takes from numpy nor gives to it."""
    values = (*model.graph.input, *model.graph.output)
    return any(value.type.tensor_type.elem_type == TensorProto.BFLOAT16 for value in values)


def _note_unchecked(reference: ReferenceRunner, checks: Sequence[OutputCheck]) -> tuple[Caution, ...]:
    """A note for each output in which no sample had a number to compare, and which no choice decides."""
    selections = reference.selections
    checked = selections.settled.union(name for one in selections.nodes for name, _ in one.choices)
    checked |= {check.name for check in checks}
    return tuple(
        Caution(
            "W120",
            f"output {arg.name!r}, {arg.type}, was not checked: it holds no numbers to compare with the float model's",
        )
        for arg in reference.session.native.get_outputs()
        if arg.name not in checked
    )


def explain_slowness(plan: Plan) -> str:
    """Why a model quantized by this plan can be slower than float, and what helps, as far as the plan says."""
    if plan.precision is not None:
        return (
            f"ONNX Runtime computes little in {plan.precision.type} on the CPU, and converts around it: "
            "leave `high_precision='float32'` where only the CPU runs it"
        )
    data = [site for site in plan.all_sites if site.role in (Role.ACTIVATION, Role.OUTPUT)]
    if not data:
        return (
            "weights alone are quantized, which saves bytes and not arithmetic: it pays where few positions are "
            "computed at a time; `bench` times other shapes, and `config='ort-int8'` computes in integers"
        )
    text = "what runs in integers saves less than quantizing and dequantizing costs on this machine"
    if any(site.spec.dynamic for site in data):
        return f"{text}; scales that stand in the file (`config='ort-int8'`) cost less than those of each run"
    if plan.placement is not None and plan.placement.method is PlacementMethod.MEASURED:
        return f"{text} at this shape and moment, though it was the fastest of the placements timed"
    return f"{text}; `placement='measured'` looks for a faster placement of int8 pairs"


def time_both(
    before: ModelLike, after: ModelLike, feeds: Mapping[str, Array], *, threads: int = 1, reason: str = ""
) -> Latency:
    """Interleaved medians of float and int8 on one sample. reason: why int8 would be slower, told where it is."""
    found = time_models({"float": before, "int8": after}, feeds, threads=threads)
    slow, fast = found["float"], found["int8"]
    # The median of the ratios round by round: a busy moment hits both models of a round alike.
    ratio = fast.speedup(slow)
    # The first axis of the first input that has one: what else is a batch, the model does not say.
    batch = next((int(value.shape[0]) for value in feeds.values() if value.ndim), 1)
    # In models of sequences it may be time.
    if batch > 1 and any(node.op_type in ("LSTM", "GRU", "RNN") for node in get_index(before).nodes):
        batch = 0
    return Latency(
        float_ms=slow.median_ms,
        int8_ms=slow.median_ms / ratio,
        threads=threads,
        shapes={name: tuple(value.shape) for name, value in feeds.items()},
        batch=batch,
        cpu=detect_cpu(),
        reason=reason if ratio < 1 else "",
    )


# Operators that some target quantizes, and those a person asks about even where none of them was.
_HEAVY = ("Conv", "ConvTranspose", "Gemm", "MatMul", "Add", "Mul", "Concat", "MaxPool", "AveragePool",
          "GlobalAveragePool", "LSTM", "GRU", "Einsum", "LeakyRelu", "Resize")  # fmt: skip
ALWAYS_SHOWN = ("Conv", "ConvTranspose", "Gemm", "MatMul", "LSTM", "GRU")


def count_ops(index: GraphIndex, plan: Plan) -> tuple[OpCount, ...]:
    """How many nodes of each operator read quantized inputs, of all in the prepared model."""
    int8 = _find_quantized_nodes(index, plan)
    rows = []
    for op in _HEAVY:
        nodes = [node.name for node in index.nodes if node.op_type == op]
        done = sum(name in int8 for name in nodes)
        if nodes and (done or op in ALWAYS_SHOWN):
            rows.append(OpCount(op=op, quantized=done, total=len(nodes)))
    return tuple(rows)


def _find_quantized_nodes(index: GraphIndex, plan: Plan) -> set[str]:
    """Nodes whose float operands all come through a pair."""
    read: dict[str, set[int]] = {}
    for site in plan.all_sites:
        for edge in site.find_readers(index):
            read.setdefault(edge.node, set()).add(edge.index)
    found = {edge.node for site in plan.all_sites if site.role is Role.WEIGHT for edge in site.consumers or ()}
    for node in index.nodes:
        tensors = ((k, index.input(node, k)) for k in range(len(node.inputs)))
        data = {k for k, tensor in tensors if tensor is not None and not index.is_constant(tensor)}
        # One computed operand beside a weight that stayed float: half quantized is not quantized.
        half = node.op_type in ALWAYS_SHOWN and len(data) < 2
        if data and not half and data <= read.get(node.name, set()):
            found.add(node.name)
    return found
