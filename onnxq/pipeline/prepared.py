"""From files to a model ready for planning, rewritten without changing its function, and samples parted by use."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from onnx import TensorProto

from onnxq.annotate import describe_quantized, find_operators
from onnxq.annotate.find import find_chains
from onnxq.arrays import ArrayDict, Arrays, InputShapes
from onnxq.backends import find_target
from onnxq.calibrate.constants import check_constants
from onnxq.config import Config, change_fields
from onnxq.data import find_extremes, load_data
from onnxq.errors import VerificationError
from onnxq.evaluation.compare import ModelErrors
from onnxq.evaluation.selections import find_selections
from onnxq.graph import Model, fix_sizes, infer_shapes, load_model, name_nodes
from onnxq.graph.convert import ensure_opset, inline_functions, limit_opset, store_densely
from onnxq.graph.index import find_opset, get_index
from onnxq.graph.light import ModelLike, add_libraries, strip_weights
from onnxq.graph.precision.widen import read_types, widen_model
from onnxq.graph.scopes import drop_absent_biases
from onnxq.passes import FloatState, PassReport, RunContext, SampleSets
from onnxq.passes.equalization.passes import EQUIVALENT_DB
from onnxq.passes.registry import MASKED_ROWS, list_rewrites, rewrite_model
from onnxq.plan import Plan
from onnxq.progress import Progress, count_items, silent
from onnxq.runtime import Session, find_front, find_runnable_opset
from onnxq.sites import NameSet
from onnxq.spec import FLOAT_TYPES
from onnxq.wording import format_shape

# DequantizeLinear has an axis from opset 13 on.
_MINIMUM_OPSET = 13
_WIDEN = "float32-compute"
_OPSET = "opset"
_DENSE = "dense"


def list_preparations() -> NameSet:
    """All that a plan's `prepare` may name."""
    return list_rewrites() | {_DENSE, _OPSET, _WIDEN}


def count_existing(state: FloatState) -> str:
    """ "already quantized: N pairs kept", with the operators on integers; "" for a float model."""
    index = state.index
    pairs = sum(chain.dequantize is not None for chain in find_chains(index))
    return describe_quantized(pairs, len(find_operators(index)))


def load_state(
    source: object,
    ctx: RunContext | None = None,
    *,
    plan: Plan | None = None,
    whole: bool = False,
    sizes: InputShapes | None = None,
    computes: int = 0,
    masked_rows: bool = False,
) -> FloatState:
    """Load and rewrite for the target of the context, whose journal gets the reports of the rewrites.

    plan: one to be carried out again, for whose target the rewrites run that it names, whatever the context leaves out.
    For an engine other than ONNX Runtime the part that ONNX Runtime can run is loaded; with `whole` all of it.
    sizes: shapes that inputs are given, by default those that the plan names. computes: the narrow ONNX type to which
    constants of a float32 model were rounded. masked_rows: the samples have rows in which everything is masked.
    """
    ctx = ctx or RunContext()
    if not masked_rows:
        ctx = replace(ctx, skip=ctx.skip | {MASKED_ROWS})
    if plan is not None:
        config = change_fields(ctx.config, target=plan.target)
        repeated = frozenset(plan.prepare)
        ctx = replace(ctx, config=config, skip=list_rewrites() - repeated, repeated=repeated)
    with ctx.progress("reading the model"):
        model = load_model(source, lazy=True)  # type: ignore[arg-type]
        host = ctx.config.runtime
        named = name_nodes(add_libraries(model.light, host.libraries, host.provider))
    sizes = sizes or (plan.sizes if plan is not None else {})
    if sizes:
        named = fix_sizes(named, sizes)
        fixed = tuple(f"{name}: {format_shape(shape)}" for name, shape in sizes.items())
        ctx.journal.append(PassReport("sizes", fixed))
    whole = whole or find_target(ctx.config.target).times_itself
    with ctx.progress("simplifying the graph"):
        return replace(_rewrite(model, named, ctx, whole, computes), sizes=sizes)


def _rewrite(
    model: Model, named: ModelLike, ctx: RunContext, whole: bool, computes: int
) -> FloatState:
    # Every later look at the graph is of nodes that run, and a function's run where it is called.
    proto = inline_functions(named)
    drop_absent_biases(proto.graph)
    opset = find_opset(proto)
    rest = None
    if not whole:
        proto, rest = find_front(proto)
        named = named if rest is None else proto
    types = replace(read_types(proto), fixed=frozenset() if rest is None else rest.reads)
    if types.narrow:
        named = proto = widen_model(proto)
    elif computes:
        types = replace(types, computes=computes)
    # Some operators are newer for the narrow types than for float32.
    if (runnable := find_runnable_opset(opset)) < opset:
        named = proto = limit_opset(proto, runnable)
    dense = store_densely(proto)
    # Before anything runs, where NaN shows far behind its origin; and before passes give weights other names.
    check_constants(get_index(dense))
    upgraded = ensure_opset(dense, _MINIMUM_OPSET)
    reports = []
    if types.computes:
        reports.append(
            PassReport(_WIDEN, (f"{FLOAT_TYPES[types.computes]} is computed in float32",))
        )
    if dense is not proto:
        reports.append(PassReport(_DENSE, ("sparse weights are stored densely",)))
    if find_opset(upgraded) != opset:
        reports.append(PassReport(_OPSET, (f"{opset} -> {find_opset(upgraded)}",)))
    state = FloatState(model, named, infer_shapes(upgraded), types, rest=rest)
    state = rewrite_model(replace(ctx, journal=reports), state)
    ctx.journal.extend(reports)
    changed = tuple(report.name for report in reports if report.changed)
    # The passes from here on hand the weights from one model to the next, and copy none of them.
    return replace(state, model=infer_shapes(strip_weights(state.model)), rewrites=changed)


# A constant that was rounded to a narrow type, such as a root of 2, is taken for what it stands for.
_NARROW_DB = {int(TensorProto.FLOAT16): 50.0, int(TensorProto.BFLOAT16): 35.0}
# Between pairs, float rounding moves a value at the edge of two steps by a whole one: 45 dB in a network of 114 pairs.
_STEP_DB = 30.0


def _run_samples(model: ModelLike, samples: Sequence[Arrays]) -> list[ArrayDict]:
    session = Session(model, optimize=False)
    return [session.run(feeds) for feeds in samples]


def prove_equal(
    state: FloatState, samples: Iterable[Arrays], *, progress: Progress = silent
) -> None:
    """Run the model before and after preparation; VerificationError when a rewrite changed its function."""
    some = list(samples)
    errors = ModelErrors()
    with progress("comparing the simplified model with the original") as task:
        # One session at a time: each may hold gigabytes.
        selections = find_selections(state.named)
        before = _run_samples(selections.expose_choices(state.named), some)
        inputs = list(map(selections.add_choices, some, before))
        after = _run_samples(selections.take_choices(state.model), inputs)
        for feeds, old, new in zip(count_items(some, task), before, after, strict=True):
            errors.update(feeds, old, new)
    rounds = any(chain.quantize is not None for chain in find_chains(state.index))
    least = _STEP_DB if rounds else _NARROW_DB.get(state.types.computes, EQUIVALENT_DB)
    for output in errors.results():
        # As a whole: float32 beside values a thousand times larger is no more exact than those are.
        # An output of zeros has no signal, and rounding alone makes any decibels of it.
        if output.whole_db < least and output.max_abs > 1e-6:
            raise VerificationError(
                f"output {output.name}",
                f"preparation changed it ({output.whole_db:.1f} dB, max |difference| {output.max_abs:.3g})",
                f"leave passes out with `skip: [{', '.join(state.rewrites)}]` and report this model",
                code="Q702",
            )


# Most samples held back for the check, and for choices; an eighth of all where that is fewer.
_MOST_HELD = 16
# Inputs made up where no samples are needed.
_MADE_UP = 8
# Of more samples than these, others are nearly as extreme as the most extreme one, and looking takes time.
_FEW = 256


def read_data(
    state: FloatState,
    data: object,
    config: Config,
    *,
    choosing: bool = False,
    progress: Progress = silent,
) -> SampleSets:
    """Load the samples; hold some back for the check, and others for the choices of passes (validation samples).

    choosing: something is, whatever the configuration says.
    """
    dataset = load_data(data, state.before.inputs, config.data, state.named, progress=progress)
    count = len(dataset)
    holdout = config.verify.holdout
    seed = config.data.seed
    if dataset.synthetic and config.mode == "dynamic":
        # Nothing is calibrated: they give shapes, and the check is fair on all of them.
        samples = dataset.take(_MADE_UP, seed)
        description = f"none needed; shapes and check: {samples.describe()}"
        return SampleSets(
            samples, samples, samples, samples, "", samples[0], description, True, seed
        )
    usual = min(_MOST_HELD, count // 8)
    if holdout is None:
        holdout = max(1, usual)
    # Two samples disagree less about a choice than one; a quarter is as much as calibration can spare.
    compares = choosing or config.effort != "fast" or config.attention == "auto"
    choice = max(1, usual, min(2, count // 4)) if compares and holdout else 0
    # The loudest of 32 frames decides what a recording is clipped at: silero_vad has 18 dB with it, 14 without.
    held_back = holdout + choice
    keep: Collection[int] = ()
    if dataset.spare < held_back and count <= _FEW and not dataset.synthetic:
        with progress("looking for the extreme samples", count) as task:
            keep = find_extremes(count_items(dataset.samples(), task), held_back - dataset.spare)
    calibration, test = dataset.split(held_back, seed, keep)
    other_use = (
        "calibration" if len(calibration.joined(test)) < len(calibration) + len(test) else ""
    )
    validation = test
    if choice and len(test) > 1 and not other_use:
        # Fewer than are wanted are shared out alike; the check keeps one at least that nothing was chosen on.
        validation, test = test.split(max(1, len(test) * holdout // held_back), seed)
    elif choice:
        validation = calibration
    # Ranges of all compared plans are observed on the same samples, and of no more than were asked for.
    spare = len(calibration) + len(validation) > count
    ranges = calibration if validation is test or spare else calibration.joined(validation)
    description = dataset.describe()
    if config.runtime.provider:
        description += f"; run on {config.runtime.provider}"
    if (config.verify.holdout or 0) > len(test):
        shortage = f"{len(test)} samples are held back where {config.verify.holdout} were asked for"
        description += f"; {shortage}: ranges hang on the others"
    first = dataset[0]
    synthetic = dataset.synthetic
    return SampleSets(
        calibration, ranges, validation, test, other_use, first, description, synthetic, seed
    )
