"""Every scale and zero point that a plan lacks: from the samples, from the weights, or derived from both."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from onnxq.calibrate import parts
from onnxq.calibrate.constants import Numbers, bias_numbers, find_tensor, weight_numbers
from onnxq.calibrate.parts import Part, Want, Watch
from onnxq.calibrate.taps import MANY, Taps
from onnxq.data import Dataset
from onnxq.errors import PlanError
from onnxq.graph import GraphIndex, ModelLike, get_index
from onnxq.numerics import qparams_from_range
from onnxq.plan import Plan, SitePlan, check_numbers
from onnxq.progress import Progress, silent
from onnxq.runtime import tap_tensors
from onnxq.runtime.crew import Crew, hash_model
from onnxq.sites import Refusal, Refusals, Site
from onnxq.spec import QParams


def calibrate(
    proto: ModelLike,
    plan: Plan,
    dataset: Dataset | None = None,
    *,
    batch: int | None = None,
    memory_limit: int | None = None,
    crew: Crew | None = None,
    observed: Part | None = None,
    progress: Progress = silent,
) -> Plan:
    """The plan with a scale and zero point at every site that had none; given numbers stay.

    proto: the prepared model that the plan was made for, nodes named. dataset: needed for activation sites only.
    batch: samples per run (None: 1); the result does not depend on it. memory_limit: bytes of the tapped values of one
    run (None: 1 GiB); beyond it tensors are tapped in groups, with one pass over the data for each. crew: runs the
    samples and searches the weights; the result does not depend on it. observed: the observers of all these samples;
    nothing is run then.
    A site whose tensor was never computed (a branch that no sample reached), held -inf or cannot be observed keeps
    None, and a Refusal names it; so does a bias derived from it.
    Raises CalibrationError naming tensor and sample for NaN and +inf, or where `observed` is of another model, plan or
    data; PlanError for a site that is not in the model, ModelError and DataError from the runs.
    """
    index = get_index(proto)
    qparams = _list_known(plan)
    missing = _list_missing(plan, qparams)
    watch, wants = _plan_observers(index, missing)
    unseen: Refusals = ()
    if watch.readers:
        if dataset is None:
            cause = "has no scale, and there are no samples"
            raise PlanError(next(iter(wants)), cause, "give samples, `data=…`", code="Q405")
        if observed is not None:
            readers = parts.freeze_readers(watch, proto)
            parts.check_keys(
                observed, parts.make_keys(hash_model(proto), readers, dataset), "this run"
            )
            parts.check_samples(observed, dataset)
            parts.merge_observers(watch, observed.wants, observed.observers)
            unseen = tap_tensors(proto, watch.readers, only=True).refusals
        else:
            unseen = _observe_tensors(
                proto, watch, dataset, dataset, batch, memory_limit, crew, progress
            )
    count = 1 if dataset is None else len(dataset)
    sample_count = f" over {count} samples" if count != 1 else ""
    qparams.update(_choose_qparams(missing, wants, watch, sample_count))
    # Weights after activations, biases after both: each needs the scales before it.
    by_tensor = {refusal.subject: refusal for refusal in unseen}
    refusals = _list_refusals(index, wants, qparams, watch, by_tensor)
    biases = [site for site in plan.sites if site.role.is_bias]
    qparams.update(weight_numbers(index, missing, biases, qparams, progress, crew))
    qparams.update(bias_numbers(index, missing, qparams))
    sites = tuple(replace(site, qparams=qparams.get(site.site)) for site in plan.sites)
    done = replace(plan, sites=sites, refusals=(*plan.refusals, *refusals))
    check_numbers(done)
    return done


def _observe_tensors(
    proto: ModelLike,
    watch: Watch,
    samples: Dataset,
    whole: Dataset,
    batch: int | None,
    memory_limit: int | None,
    crew: Crew | None,
    progress: Progress,
) -> Refusals:
    """Update the observers of tensors by samples, some of the whole. Returns why some tensors cannot be observed."""
    many = len(whole) >= MANY
    tensors = [tensor for tensor, _ in parts.freeze_readers(watch, proto)]
    taps = Taps(proto, tensors, memory_limit, many=many)
    if not taps.tensors:
        return taps.refusals
    # Sums of floats depend, in their last bits, on the threads of each run.
    taps.runs = taps.count_runs(whole.batches(batch)) if many else 0
    if crew is None or crew.plain:
        parts.observe_samples(taps, watch, samples, batch=batch, progress=progress)
    else:
        parts.observe_in_chunks(
            crew,
            proto,
            watch,
            samples,
            runs=taps.runs,
            batch=batch,
            memory_limit=memory_limit,
            progress=progress,
        )
    return taps.refusals


def observe_part(
    proto: ModelLike,
    plan: Plan,
    dataset: Dataset,
    positions: Sequence[int],
    *,
    batch: int | None = None,
    memory_limit: int | None = None,
    crew: Crew | None = None,
    progress: Progress = silent,
) -> Part:
    """The observers that `calibrate` makes scales of, after the samples at these positions. See `calibrate`.

    Raises PlanError for a plan that needs no samples.
    """
    watch, _ = _plan_observers(get_index(proto), _list_missing(plan, _list_known(plan)))
    if not watch.readers:
        cause = "no activation has a scale that is fixed beforehand: there is nothing to calibrate"
        raise PlanError(plan.model, cause, "quantize without parts", code="Q405")
    # Without the constants, which are looked at once, by `calibrate`.
    readers = parts.freeze_readers(watch, proto)
    fresh = parts.make_watch(readers)
    some = dataset.part(positions)
    # All parts are run alike: by the samples of the whole.
    _observe_tensors(proto, fresh, some, dataset, batch, memory_limit, crew, progress)
    return parts.make_part(
        parts.make_keys(hash_model(proto), readers, dataset), readers, fresh, dataset, positions
    )


def _list_known(plan: Plan) -> dict[Site, QParams]:
    """Numbers given with the plan."""
    qparams = {site.site: site.qparams for site in plan.all_sites if site.qparams is not None}
    # A group of weights is called after the one whose kernel the scales are for, the others being its transposes.
    leaders = (
        site for site in plan.all_sites if not site.role.is_weight or site.name == site.group
    )
    by_group = {
        site.group: site.qparams for site in leaders if site.group and site.qparams is not None
    }
    for site in plan.sites:
        shared = by_group.get(site.group)
        if shared is not None and site.qparams is None:
            # Numbers of another tool hold for any spec, and so they do for those that share them.
            levels = shared.computed_for and site.spec.levels
            qparams[site.site] = replace(shared, computed_for=levels)
    return qparams


def _list_missing(plan: Plan, known: Numbers) -> list[SitePlan]:
    """The sites that have no numbers, and get none at each run."""
    return [site for site in plan.sites if site.site not in known and not site.spec.dynamic]


def _plan_observers(index: GraphIndex, sites: Sequence[SitePlan]) -> tuple[Watch, dict[Site, Want]]:
    """An observer for each measured tensor or sharing group, and the request of each of their sites."""
    watch = Watch()
    wants = {}
    groups: dict[str, SitePlan] = {}
    for site in sites:
        if not site.role.is_measured:
            continue
        first = groups.setdefault(site.group, site) if site.group else site
        if first.spec != site.spec:
            raise PlanError(
                site.name,
                f"shares its scale with {first.site} but has another spec",
                "make them equal",
                code="Q403",
            )
        if not site.spec.has_one_scale:
            raise PlanError(
                site.name,
                "activations have one scale per tensor",
                "ask for granularity: tensor",
                code="Q403",
            )
        tensor = find_tensor(index, site.site)
        # The first site of a group decides, so that all members share one observer.
        want = Want(
            f"group {site.group}" if site.group else f"tensor {tensor}", first.observer, first.spec
        )
        wants[site.site] = want
        # The NPU reads constant operands behind pairs, too: these are the same in every sample.
        value = index.find_constant(tensor)
        if value is None:
            watch.add(want, tensor)
        else:
            watch.add_constant(want, value)
    return watch, wants


def _choose_qparams(
    sites: Sequence[SitePlan], wants: Mapping[Site, Want], watch: Watch, suffix: str
) -> dict[Site, QParams]:
    """Scale and zero point of every site whose observer saw values; one for all sites of a group."""
    by_request = {}
    chosen = {}
    for site in sites:
        want = wants.get(site.site)
        # Of a mask with -inf there is no range: the operators that read it stay float.
        if want is None or watch.observers[want].infinite or not watch.observers[want].count:
            continue
        # Members of a group have one bound, others may differ though they share an observer.
        key = (want, None if site.group else site.bound)
        if key not in by_request:
            low, high = watch.observers[want].range()
            by_request[key] = qparams_from_range(
                low, high, site.spec, origin=f"{want.observer.name}{suffix}", bound=site.bound
            )
        chosen[site.site] = by_request[key]
    return chosen


def _list_refusals(
    index: GraphIndex,
    wants: Mapping[Site, Want],
    qparams: Numbers,
    watch: Watch,
    unseen: Mapping[str, Refusal],
) -> list[Refusal]:
    """Refusals of the sites without numbers: tensors that cannot be observed, held -inf, or that no sample computed."""
    refusals = []
    for site, want in wants.items():
        if site in qparams:
            continue
        tensor = find_tensor(index, site)
        known = unseen.get(str(tensor))
        reason = (
            f"calibration never ran the branch it lies in ({tensor.scope})"
            if tensor.scope
            else "was always empty"
        )
        fix = "give samples that reach it"
        if known is not None:
            reason = known.reason
            fix = known.fix
        elif watch.observers[want].infinite:
            reason = "holds -inf or NaN, as masks do, which no integer stands for"
            fix = "give the mask a large finite value in place of -inf to quantize it"
        refusals.append(Refusal(str(site), reason, fix, "calibrate", "R106"))
    return refusals
