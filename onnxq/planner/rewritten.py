"""The sites of a plan in another graph: found by names and structure, or by values where tools rewrote the graph."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from onnxq.arrays import Array
from onnxq.errors import PlanError, suggest_names
from onnxq.graph import GraphIndex, MaybeNode, NodeRef, compute_structural_ids
from onnxq.numerics import quantize_weight
from onnxq.plan import Plan, SitePlan, SitePlans
from onnxq.planner.recognize import MOVERS, Recognized
from onnxq.sites import Edge, Edges, MaybeTensor, Site, TensorId
from onnxq.spec import PerChannel, PerTensor

# Digits that no number of an input has, so that a made-up one costs no time.
_DIGITS = 7


@dataclass(eq=False)
class Anchors:
    """Tensors and nodes of a model, found by the names and structural ids of a plan: a node's is that of its output 0.

    known: node name of the plan -> structural id. lasting: names hold also where no structural id agrees.
    recognized: nodes and tensors by their values, which hold before all names.
    """

    index: GraphIndex
    known: Mapping[str, str]
    lasting: bool
    recognized: Recognized | None

    def __post_init__(self) -> None:
        self.ids = compute_structural_ids(self.index)
        self.by_id: dict[str, list[TensorId]] = {}
        for tensor, anchor in self.ids.items():
            self.by_id.setdefault(anchor, []).append(tensor)

    def find_node(self, name: str, anchor: str) -> MaybeNode:
        """The node of this name if its anchor agrees (or is not known), else the only one with the anchor."""
        if self.recognized is not None and name in self.recognized.contents.nodes:
            recognized_node = self.recognized.nodes.get(name)
            # Scaling puts other nodes in the place of some, under their names.
            return None if recognized_node is None else self.index.named.get(recognized_node.name)
        own = self.index.named.get(name)
        # Without an anchor, as where a person took it out, the name alone decides.
        if own is not None and anchor in ("", self.ids.get(own.result, "")):
            return own
        makers = [
            node
            for tensor in self.by_id.get(anchor, ())
            if (node := self.index.find_producer(tensor)) is not None and node.result == tensor
        ]
        # Of two alike nothing says which is meant.
        return makers[0] if len(makers) == 1 else own if self.lasting else None

    def node(self, name: str) -> NodeRef:
        """The node that the plan calls so. Raises PlanError where there is none."""
        node = self.find_node(name, self.known.get(name, ""))
        if node is None:
            raise PlanError(
                name or "a node without a name",
                "this node is in the plan but not in this model",
                self.suggest_nodes(name),
                code="Q404",
            )
        return node

    def suggest_nodes(self, name: str) -> str:
        """The nearest nodes, for a person: by values where the plan has some, else by name."""
        if self.recognized is None or name not in self.recognized.contents.nodes:
            if name in self.index.named:
                return f"{name!r} is there, but reads what is made otherwise: plan this model"
            return suggest_names(name, self.index.named)
        output = self.recognized.contents.nodes[name].output
        return f"of its output {output!r}, {self.recognized.suggest_tensors(output)}"

    def edge(self, edge: Edge) -> Edge:
        """The input that the plan calls so. Raises PlanError where its node is not there."""
        return self.node(edge.node).make_edge(edge.index)

    def find_site(self, site: SitePlan) -> Site | None:
        """A site by name where the anchor agrees, else by anchor alone."""
        anchor, _, k = site.anchor.rpartition("/")
        if isinstance(site.site, Edge):
            node = self.find_node(site.site.node, anchor)
            return None if node is None else node.make_edge(site.site.index)
        if site.role.is_constant and site.consumers:
            # Constants are known by who reads them: those of one value have one structural id.
            reader = self.find_node(site.consumers[0].node, anchor)
            position = int(k) if k.isdecimal() and len(k) < _DIGITS else site.consumers[0].index
            return self.index.find_input(reader, position)
        return self.find_tensor(site.site, site.anchor)

    def find_tensor(self, tensor: TensorId, anchor: str) -> MaybeTensor:
        """The tensor of this name if its anchor agrees (or is not known), else the only one with the anchor."""
        if self.recognized is not None and not tensor.scope:
            likely = self.recognized.tensors.get(tensor.name)
            if likely is not None:
                return next(iter(likely), None)
        there = self.index.resolve_tensor(tensor.name, tensor.scope) == tensor
        if there and anchor in ("", self.ids.get(tensor, "")):
            return tensor
        candidates = self.by_id.get(anchor, [])
        return candidates[0] if len(candidates) == 1 else tensor if self.lasting and there else None


# A tensor of this graph, and the inputs that read it dequantized; None: all of them.
Place = tuple[TensorId, Edges | None]


def move_rewritten(plan: Plan, anchors: Anchors, recognized: Recognized) -> SitePlans:
    """The sites in this graph's names, each with all its readers.

    A site has several places where a tool gave its readers tensors of their own, and none where it merged two tensors
    of equal values that were both quantized. A weight that is read transposed is quantized along its other axis; of
    those that a tool put side by side in one, the scales stand side by side, too.
    Raises PlanError naming the first site that is not there, with the tensors nearest by their values.
    """
    mover = _Mover(plan, anchors, recognized)
    for site in _join_weights(mover, plan):
        mover.move_site(site)
    return tuple(
        site
        if site.derived is None
        else replace(
            site, derived=(mover.find_moved(site.derived[0]), mover.find_moved(site.derived[1]))
        )
        for site in mover.done
    )


class _Mover:
    def __init__(self, plan: Plan, anchors: Anchors, recognized: Recognized) -> None:
        self.anchors = anchors
        self.recognized = recognized
        self.index = anchors.index
        self.done: list[SitePlan] = []
        # The plan's sites as they are called here. taken: their opposite.
        self.moved: dict[Site, Site] = {}
        self.taken: dict[Site, Site] = {}
        # Inputs in the plan, with the site that they read.
        self.claims: dict[tuple[str, int], Site] = {}
        for site in plan.sites:
            where = site.site
            edges = [(edge.node, edge.index) for edge in site.named_consumers]
            if isinstance(where, Edge):
                edges.append((where.node, where.index))
            elif site.consumers is None:
                edges += recognized.readers.get(where.name, ())
            self.claims.update(dict.fromkeys(edges, where))

    def move_site(self, site: SitePlan) -> None:
        """Add the site in all its places."""
        if site.site in self.moved:
            raise PlanError(
                site.name,
                "stands twice in the plan",
                "take one of the two sites out",
                code="Q403",
            )
        for tensor, readers in self._list_places(site):
            where: Site = tensor
            if where in self.taken:
                if readers is None:
                    # Two tensors of the plan are one here, and so are their pairs.
                    self.moved.setdefault(site.site, where)
                    continue
                # A second site on one tensor gets a pair of its own, called after the first input
                # behind it.
                where = readers[0]
            self.taken[where] = site.site
            self.moved.setdefault(site.site, where)
            self.done.append(
                self._orient_site(replace(site, site=where, tensor=tensor, consumers=readers), site)
            )

    def find_moved(self, site: Site) -> Site:
        """The name here of a site that a bias derives from; of one merged into another, the other's."""
        if site in self.moved:
            return self.moved[site]
        name = site.name if isinstance(site, TensorId) else ""
        readers = (reader for reader, _ in self.recognized.readers.get(name, ()))
        heirs = (
            self.claims.get(edge)
            for reader in filter(self.recognized.has_lost, readers)
            for edge in self.recognized.follow_readers(reader)
        )
        return next((self.moved[heir] for heir in heirs if heir in self.moved), site)

    def _list_places(self, site: SitePlan) -> list[Place]:
        if isinstance(site.site, TensorId) and site.consumers is None:
            first = self.anchors.find_tensor(site.site, site.anchor)
            if first is None:
                raise self._explain_missing(site)
            others = self.recognized.tensors.get(site.site.name, ())[1:]
            rest = [
                (t, self._find_readers(site.site.name, t))
                for t in others
                if first not in self.index.walk_back(t, MOVERS)
            ]
            # Others of its values that none of its readers reads are float in the plan, too.
            return [(first, None), *((t, readers) for t, readers in rest if readers)]
        edges = site.consumers if site.consumers is not None else (site.site,)
        places: dict[TensorId, dict[Edge, None]] = {}
        for edge in edges:
            assert isinstance(edge, Edge)
            for image in self._find_images(edge, site):
                tensor = self.index.find_input(self.index.named[image.node], image.index)
                if tensor is None:
                    raise self._explain_missing(site)
                places.setdefault(tensor, {})[image] = None
        return [(tensor, tuple(images)) for tensor, images in places.items()]

    def _find_images(self, edge: Edge, site: SitePlan) -> list[Edge]:
        """An input of the plan in this graph: of a lost node those that its values go to, but for other sites' own."""
        if not self.recognized.has_lost(edge.node):
            if self.anchors.find_node(edge.node, self.anchors.known.get(edge.node, "")) is None:
                raise self._explain_missing(site, edge.node)
            return [self.anchors.edge(edge)]
        onward = self.recognized.follow_readers(edge.node)
        return [
            self.anchors.edge(Edge(node, k)) for node, k in onward if (node, k) not in self.claims
        ]

    def _find_readers(self, name: str, tensor: TensorId) -> Edges:
        nodes = self.recognized.nodes
        edges = [
            Edge(nodes[reader].name, k)
            for reader, k in self.recognized.readers[name]
            if reader in nodes
        ]
        return tuple(edge for edge in edges if edge in self.index.list_consumers(tensor))

    def _orient_site(self, site: SitePlan, known: SitePlan) -> SitePlan:
        """The site of a weight along its other axis, where its reader transposes it and the plan's did not."""
        if not site.role.is_weight or not site.consumers or not known.consumers:
            return site
        was = self.recognized.contents.nodes.get(known.consumers[0].node)
        node = self.index.named[site.consumers[0].node]
        # A MatMul's weight is [K, N]; where a tool wrote a Gemm with transB it is [N, K].
        if was is None or site.consumers[0].index != 1 or was.turned == node.is_transposed:
            return site
        return turn_site(site)

    def _explain_missing(self, site: SitePlan, reader: str = "") -> PlanError:
        """The error of a site. reader: a node of the plan that was not found, perhaps for want of its other inputs."""
        tensor = site.tensor or site.site
        node = self.recognized.contents.nodes.get(reader)
        inputs = () if node is None else node.inputs
        lost = next((name for name in inputs if self.recognized.tensors.get(name) == ()), "")
        if node is not None and not lost:
            cause = f"is in the plan but not in this model: nothing there computes the same as its reader {reader!r}"
            return PlanError(site.name, cause, self.anchors.suggest_nodes(reader), code="Q404")
        name = lost or (tensor.name if isinstance(tensor, TensorId) else "")
        near = self.recognized.suggest_tensors(name)
        fix = f"{near}{'; ' if near else ''}plan this model again, or leave out the rewrite that changed it"
        if name in self.recognized.tensors and self.recognized.contents.tensors[name].constant:
            fix += "; weights that were trained anew need `new_weights=True` and the graph as it was exported"
        cause = "is in the plan but not in this model, under any name"
        return PlanError(name or site.name, cause, fix, code="Q404")


def _join_weights(mover: _Mover, plan: Plan) -> Iterator[SitePlan]:
    """The plan's sites, with one in place of those of weights that are columns of one here.

    Raises PlanError naming a weight that is quantized or scaled in another way than those beside it.
    """
    claims = mover.claims
    contents = mover.recognized.contents
    known = plan.by_site
    done = dict[Site, SitePlan | None]()
    # A scaling may divide one of the weights, which here is none of its own.
    scaled = {
        mover.recognized.find_joined_maker(joined.tensor.name): joined.tensor
        for joined in plan.scalings
    }
    for name, columns in mover.recognized.joined.items():
        parts = {
            part: _spread_scale(known[claims[part, 1]], columns[part])
            for part in columns
            if (part, 1) in claims
        }
        tensor = mover.index.find_input(mover.index.named[name], 1)
        value = mover.index.find_constant(tensor)
        if not parts or value is None:
            continue
        first = next(iter(parts))
        for part in columns:
            site = parts.get(part)
            same = site is not None and site.qparams and site.spec == parts[first].spec
            # Nothing else reads the weight, and the data have one pair for all.
            read_once = site is not None and len(site.named_consumers) == 1
            alone = same and read_once and claims.get((part, 0)) == claims.get((first, 0))
            if not alone or name in scaled:
                how = (
                    f"the plan scales {str(scaled[name])!r}, which is computed of it"
                    if alone
                    else "is quantized in another way than the other parts"
                )
                cause = f"is a part of {str(tensor)!r} here, and {how}"
                fix = "leave its MatMul one of its own when the file is rewritten, or plan this model again"
                raise PlanError(contents.nodes[part].inputs[1], cause, fix, code="Q404")
        done |= {site.site: None for site in parts.values()}
        done[parts[first].site] = _join_sites(
            value, [(parts[part], columns[part]) for part in columns]
        )
    return (joined for site in plan.sites if (joined := done.get(site.site, site)) is not None)


def _spread_scale(site: SitePlan, columns: slice) -> SitePlan:
    """The site of a matrix with a scale for each of its columns, where it had one for all."""
    if not site.spec.has_one_scale or site.qparams is None:
        return site
    scale, zero = (
        np.full(columns.stop - columns.start, number)
        for number in (site.qparams.scale, site.qparams.zero_point)
    )
    spec = replace(site.spec, granularity=PerChannel(1))
    # Numbers for other levels would be computed again.
    qparams = replace(site.qparams, scale=scale, zero_point=zero, computed_for=spec.levels)
    return replace(site, spec=spec, qparams=qparams)


def _join_sites(value: Array, parts: Sequence[tuple[SitePlan, slice]]) -> SitePlan:
    """One site for a matrix whose columns have sites of one spec."""
    qparams = [site.qparams for site, _ in parts if site.qparams is not None]
    scale = np.concatenate([part_qparams.scale for part_qparams in qparams], -1)
    zero = np.concatenate([part_qparams.zero_point for part_qparams in qparams], -1)
    values = None
    if any(site.values is not None for site, _ in parts):
        # Integers that were chosen stay; the others are those that rounding gives.
        values = np.concatenate(
            [
                quantize_weight(value[:, columns], part_qparams, site.spec, site.sum_orders)
                if site.values is None
                else site.values
                for (site, columns), part_qparams in zip(parts, qparams, strict=True)
            ],
            1,
        )
    first = parts[0][0]
    return replace(first, qparams=replace(qparams[0], scale=scale, zero_point=zero), values=values)


def turn_site(site: SitePlan) -> SitePlan:
    """The site of a matrix for its transpose."""
    grain = site.spec.granularity
    qparams = site.qparams
    if not isinstance(grain, PerTensor):
        site = replace(
            site, spec=replace(site.spec, granularity=replace(grain, axis=1 - grain.axis % 2))
        )
    # Scales of blocks have the rank of the weight; those of channels are a vector, whatever axis
    # they lie along.
    if qparams is not None and qparams.scale.ndim == 2:
        turned = replace(
            qparams, scale=qparams.scale.T.copy(), zero_point=qparams.zero_point.T.copy()
        )
        site = replace(site, qparams=turned)
    return site if site.values is None else replace(site, values=site.values.T.copy())
