"""Fit a plan to the same network exported again: other node order, other names for nodes and tensors that had none."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from onnxq.backends import find_target
from onnxq.errors import PlanError, suggest_names
from onnxq.graph import GraphIndex
from onnxq.graph.identity import Fingerprint
from onnxq.plan import Plan, PrecisionPlan, SitePlan, SitePlans
from onnxq.planner.build import anchor_sites, find_needed_opset
from onnxq.planner.place import find_float_nodes
from onnxq.planner.recognize import Recognized
from onnxq.planner.rewritten import Anchors, move_rewritten
from onnxq.planner.sums import bind_sums, digest_weights, mend_sums
from onnxq.sites import Caution, Cautions, Edge, Site, drop_repeats
from onnxq.spec import PerTensor


def fit_plan(
    plan: Plan,
    index: GraphIndex,
    now: Fingerprint,
    *,
    new_weights: bool = False,
    recognized: Recognized | None = None,
) -> Plan:
    """The plan with every site named as in this model.

    A site is found by its names, else by its anchor (the structural id of its tensor) when exactly one
    tensor has it. Names that the plan calls lasting hold also where no tensor has the anchor, because the graph around
    them changed. recognized: the plan's nodes and tensors by their values, in a graph that tools rewrote; these hold
    before all names. new_weights: the weights may differ from those the plan was made for; their scales are
    then dropped so that calibration computes them again.

    Integers that would overflow 16-bit sums of the target's kernels are moved, and entries of a site that a
    person took out go with it; both with a warning in the plan.

    Raises PlanError naming the first site that is not there, stands twice or does not fit, or weights changed unasked.
    """
    anchors = Anchors(index, plan.nodes, lasting=plan.lasting, recognized=recognized)
    # Pairs that the model came with are called as in it.
    moved = {site.site: site.site for site in plan.existing}
    if recognized is not None:
        sites = move_rewritten(plan, anchors, recognized)
    else:
        moved = {**_find_sites(plan, index, anchors), **moved}
        sites = tuple(_move_site(site, moved, anchors) for site in plan.sites)
    existing = tuple(_move_site(site, moved, anchors) for site in plan.existing)
    sites, orphans = drop_orphans(sites, existing)
    sites = tuple(check_site(site, index) for site in sites)
    weights = digest_weights(sites, index) if plan.lasting else now.weights
    biases = tuple(replace(bias, edge=anchors.edge(bias.edge)) for bias in plan.biases)
    # Weights were recognized by their values.
    if plan.weights != weights and recognized is None:
        if not new_weights:
            raise _explain_weights(plan)
        # Corrections are of the errors of those weights.
        sites = tuple(site.without_numbers() if site.role.is_constant else site for site in sites)
        biases = ()
    if recognized is None:
        floats, nodes = tuple(anchors.node(name).name for name in plan.float_nodes), plan.nodes
    else:
        floats = plan.float_nodes and find_float_nodes(index, sites, find_target(plan.target))
        sites, nodes = anchor_sites(index, sites, floats, anchors.ids)
    done = replace(
        plan,
        sites=sites,
        existing=existing,
        biases=biases,
        float_nodes=floats,
        topology=now.topology,
        weights=weights,
        nodes=nodes,
        opset=max(plan.opset, find_needed_opset(sites, index)),
        precision=_move_types(plan.precision, anchors),
    )
    done, lines = mend_sums(bind_sums(done, index), index)
    return replace(done, warnings=drop_repeats(done.warnings + orphans + lines))


def _explain_weights(plan: Plan) -> PlanError:
    # The mark of a lasting plan is of the weights it names alone.
    edited = ", or weights were added to the plan or taken out of it" if plan.lasting else ""
    cause = f"the plan's weight scales were computed from other weights than this model's{edited}"
    fix = "pass `new_weights=True` to compute them again from these, or quantize anew"
    return PlanError(plan.model, cause, fix, code="Q402")


def _find_sites(plan: Plan, index: GraphIndex, anchors: Anchors) -> dict[Site, Site]:
    """The name in this model of every site of the plan. PlanError for a repeated one."""
    moved = {}
    taken: dict[Site, SitePlan] = {}
    for site in plan.sites:
        name = site.name
        if site.consumers == () and site.role.is_constant:
            fix = "take `consumers` out for all readers of the tensor"
            raise PlanError(name, "has no reader", fix, code="Q403")
        where = anchors.find_site(site)
        if where is None:
            raise PlanError(
                name,
                "is in the plan but not in this model",
                _suggest_names(site, anchors),
                code="Q404",
            )
        twin = taken.setdefault(where, site)
        if twin is not site or site.site in moved:
            other = f", once as {twin.site}" if twin.site != site.site else ""
            raise PlanError(
                name,
                f"stands twice in the plan{other}",
                "take one of the two sites out",
                code="Q403",
            )
        moved[site.site] = where
    return moved


def _move_site(site: SitePlan, moved: Mapping[Site, Site], anchors: Anchors) -> SitePlan:
    """The site in this model's names. moved: of its sites; one that a bias derives from may have its name already."""
    consumers = site.consumers
    derived = site.derived
    if consumers is not None:
        consumers = tuple(map(anchors.edge, consumers))
    if derived is not None:
        x, weight = derived
        derived = moved.get(x, x), moved.get(weight, weight)
    return replace(site, site=moved[site.site], consumers=consumers, derived=derived)


def _move_types(types: PrecisionPlan | None, anchors: Anchors) -> PrecisionPlan | None:
    """The float types in this model's names."""
    if types is None:
        return None
    lost = anchors.recognized.has_lost if anchors.recognized is not None else lambda _: False
    wide = tuple(
        replace(node, node=anchors.node(node.node).name)
        for node in types.kept
        if not lost(node.node)
    )
    limited = tuple(anchors.edge(edge) for edge in types.limited if not lost(edge.node))
    return replace(types, kept=wide, limited=limited)


def _suggest_names(site: SitePlan, anchors: Anchors) -> str:
    # A weight or bias was looked for by its first reader.
    where = next(iter(site.named_consumers), site.site)
    if isinstance(where, Edge):
        return anchors.suggest_nodes(where.node)
    known = {t for node in anchors.index.nodes for t in node.inputs + node.outputs} - {""}
    if where.name in known:
        return "it is there, but made otherwise: take `anchor` out of this site to go by its name alone"
    return suggest_names(where.name, known)


def drop_orphans(sites: SitePlans, existing: Iterable[SitePlan]) -> tuple[SitePlans, Cautions]:
    """The sites without biases whose input or weight was taken out of the plan, and a line for each.

    existing: pairs that the model came with, from which biases may derive too.
    """
    known = {site.site for site in (*existing, *sites)}
    lines = []
    for site in sites:
        gone = [str(part) for part in site.derived or () if part not in known]
        if gone:
            text = f"{site.site}: left float, its scale follows from {gone[0]}, which is not in the plan"
            lines.append(Caution("W121", text))
    return tuple(site for site in sites if known.issuperset(site.derived or ())), tuple(lines)


def check_site(site: SitePlan, index: GraphIndex) -> SitePlan:
    """The site; that of a weight or bias with its readers. Raises PlanError where it does not fit its tensor."""
    name = site.name
    constant = site.role.is_constant
    grain = site.spec.granularity
    tensor = index.find_at(site.site)
    if tensor is None:
        raise PlanError(
            name, "this input is not connected in this model", "plan this model again", code="Q404"
        )
    if constant:
        # A constant has a copy in integers for the readers it names, so that none comes under it unnoticed.
        site = replace(site, consumers=site.find_readers(index))
    for edge in site.named_consumers:
        if index.find_at(edge) != tensor:
            others = ", ".join(map(str, index.list_consumers(tensor)[:4]))
            cause = f"is not read by {edge}, which its `consumers` name"
            raise PlanError(name, cause, f"readers: {others}", code="Q403")
    value = index.find_constant(tensor) if constant else None
    if constant and value is None:
        fix = "make its role activation, or plan this model again"
        raise PlanError(
            name, f"is not a constant in this model, as a {site.role} is", fix, code="Q404"
        )
    if (
        value is not None
        and not isinstance(grain, PerTensor)
        and not -value.ndim <= grain.axis < value.ndim
    ):
        cause = f"axis {grain.axis} is outside its shape {list(value.shape)}"
        raise PlanError(name, cause, "give the axis of its channels", code="Q403")
    if site.values is not None and (value is None or site.values.shape != value.shape):
        shape = "a computed tensor" if value is None else f"a tensor of shape {list(value.shape)}"
        cause = f"its values of shape {list(site.values.shape)} do not fit {shape}"
        raise PlanError(name, cause, "take `values` out, or plan this model again", code="Q408")
    return site
