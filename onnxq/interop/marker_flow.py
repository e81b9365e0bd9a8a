"""The float tensor that each marker quantizes, and the readers of that tensor through the marker.

Markers with equal numbers on one tensor are one site. A marker stays in the float model as an Identity, with its site
behind it, where the float model has no tensor for it: behind a marker with other numbers, and in front of a graph
output whose float tensor has other readers. A weight's marker moves through Transposes to the nodes that compute with
the weight, which is then stored in their order of axes.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from onnxq.errors import ModelError
from onnxq.graph import GraphIndex
from onnxq.interop.marker_nodes import Marker, check_shape
from onnxq.sites import Edge, NameSet, TensorId
from onnxq.spec import PerBlock, PerChannel, QuantSpec
from onnxq.wording import join_names

# Order of axes, as Transpose has it.
Perm = tuple[int, ...]
# Names listed in an error, behind the first.
_OTHERS = 7


@dataclass(eq=False)
class MarkerGroup:
    """Markers with equal numbers on one float tensor."""

    first: Marker
    # The float tensor.
    base: TensorId
    # Names of the quantizers.
    sites: list[str] = field(default_factory=list)
    # Inputs that read the tensor through the markers.
    edges: list[Edge] = field(default_factory=list)
    # Markers whose result is a graph output; the base takes the name of the only one.
    outputs: list[Marker] = field(default_factory=list)
    # The base has no other readers.
    whole: bool = False
    # Order of the weight's axes as these inputs read it; () for its own.
    perm: Perm = ()

    @property
    def spec(self) -> QuantSpec:
        """The spec of the tensor as the edges read it, with the axis at its place in their order."""
        grain = self.first.spec.granularity
        if not self.perm or not isinstance(grain, (PerChannel, PerBlock)):
            return self.first.spec
        return replace(
            self.first.spec,
            granularity=replace(grain, axis=self.perm.index(grain.axis % len(self.perm))),
        )


@dataclass(frozen=True, eq=False)
class Flow:
    """All groups of a model."""

    groups: tuple[MarkerGroup, ...]
    # Result of each marker -> the float tensor that it stands for.
    bases: Mapping[TensorId, TensorId]
    # Names of the markers that stay as Identities.
    carriers: NameSet


def find_flow(markers: Sequence[Marker], index: GraphIndex) -> Flow:
    """The groups of markers, each on its float tensor. Raises ModelError for numbers that do not fit the tensor."""
    by_result = {marker.result: marker for marker in markers}
    carriers = {
        m.node.name
        for m in markers
        if m.source in by_result and not by_result[m.source].agrees_with(m)
    }
    # Keeping one marker as an Identity moves the bases behind it, so until nothing changes.
    while True:
        # Result of each marker -> the float tensor that it stands for once the markers are removed. In the order in
        # which they run: what stands for a source is known.
        bases: dict[TensorId, TensorId] = {}
        for marker in markers:
            base = bases.get(marker.source, marker.source)
            bases[marker.result] = marker.result if marker.node.name in carriers else base
        groups = _group_markers(markers, index, bases, carriers)
        homeless = _find_output_markers(groups, index)
        if not homeless:
            break
        carriers |= {marker.node.name for marker in homeless}
    for group in groups:
        check_shape(
            group.first, index.find_shape(group.base) or index.find_shape(group.first.source)
        )
    landed = tuple(part for group in groups for part in _follow_transposes(group, index))
    return Flow(landed, bases, frozenset(carriers))


def _group_markers(
    markers: Sequence[Marker],
    index: GraphIndex,
    bases: Mapping[TensorId, TensorId],
    carriers: set[str],
) -> list[MarkerGroup]:
    """The groups in the order of their first markers."""
    groups = []
    bypassed = {marker.node.name for marker in markers} - carriers
    on: dict[TensorId, list[MarkerGroup]] = defaultdict(list)
    for marker in markers:
        base = bases[marker.result]
        group = next((g for g in on[base] if g.first.agrees_with(marker)), None)
        if group is None:
            group = MarkerGroup(marker, base)
            on[base].append(group)
            groups.append(group)
        if marker.site not in group.sites:
            group.sites.append(marker.site)
        group.edges.extend(e for e in index.list_consumers(marker.result) if e.node not in bypassed)
        if index.is_output(marker.result) and marker.node.name not in carriers:
            group.outputs.append(marker)
    # Of several groups on one tensor none may claim all its readers, nor may one that misses some.
    for base, sharing in on.items():
        stays = base in bases and bases[base] == base
        raw = {e for e in index.list_consumers(base) if e.node not in bypassed}
        alone = len(sharing) == 1 and raw <= set(sharing[0].edges)
        sharing[0].whole = (
            alone and (stays or not index.is_output(base)) and not index.captured(base)
        )
    return groups


def _find_output_markers(groups: Sequence[MarkerGroup], index: GraphIndex) -> list[Marker]:
    """Markers in front of a graph output whose name their float tensor cannot take."""
    markers = []
    for group in groups:
        maker = index.find_producer(group.base)
        free = (
            group.whole
            and maker is not None
            and not index.is_output(group.base)
            and len(group.outputs) == 1
            and maker.scope == group.outputs[0].node.scope
        )
        if not free:
            markers.extend(group.outputs)
    return markers


def _follow_transposes(group: MarkerGroup, index: GraphIndex) -> list[MarkerGroup]:
    """The group itself; for a weight, one group for each order of axes that nodes compute with."""
    if not group.first.role.is_weight or not index.is_constant(group.base):
        return [group]
    shape = index.find_shape(group.base) or ()
    landings = defaultdict(list)
    # Reversed, so that the last of the list is the first reader and groups come in the order of readers.
    waiting = [(edge, tuple(range(len(shape)))) for edge in reversed(group.edges)]
    while waiting:
        edge, perm = waiting.pop()
        turned = _apply_transpose(edge, perm, index)
        if turned is None:
            landings[perm].append(edge)
        else:
            result, now = turned
            waiting.extend((reader, now) for reader in reversed(index.list_consumers(result)))
    return [replace(group, edges=edges, perm=perm, whole=False) for perm, edges in landings.items()]


def _apply_transpose(edge: Edge, perm: Perm, index: GraphIndex) -> tuple[TensorId, Perm] | None:
    """The result of a Transpose of the weight and its order of axes; None where the reader is no such Transpose."""
    node = index.find_node(edge.node)
    if not node.is_onnx("Transpose") or edge.scope:
        return None
    result = node.result
    # A result that is seen elsewhere must stay, and with it the Transpose.
    if index.is_output(result) or index.captured(result) or not index.list_consumers(result):
        return None
    own = node.attrs.get("perm") or tuple(reversed(range(len(perm))))
    return result, tuple(perm[int(k)] for k in own)


def check_quantizers(
    markers: Sequence[Marker], index: GraphIndex, quantizers: Sequence[str] | None
) -> None:
    """Raise ModelError unless the markers are those of `quantizers` (None: any) and each of them has readers."""
    first: dict[str, Marker] = {}
    for marker in markers:
        if not first.setdefault(marker.site, marker).agrees_with(marker):
            cause = "two of its markers have different numbers"
            raise ModelError(
                marker.site, cause, "give every quantizer a site of its own", code="Q120"
            )
    uses = (index.list_consumers, index.is_output, index.captured)
    read = {marker.site for marker in markers if any(is_used(marker.result) for is_used in uses)}
    sites = list(dict.fromkeys(first if quantizers is None else quantizers))
    lost = [site for site in sites if site not in read]
    if lost:
        cause = f"quantizes nothing that the exported graph computes{_list_others(lost)}"
        fix = "disable quantizers that the forward pass does not use, or call them there"
        raise ModelError(lost[0], cause, fix, code="Q120")
    strange = [site for site in first if site not in sites]
    if strange:
        cause = (
            f"is marked in the graph, and the model has no such quantizer{_list_others(strange)}"
        )
        raise ModelError(strange[0], cause, "export it again", code="Q120")


def _list_others(sites: Sequence[str]) -> str:
    """The sites after the first, as the end of an error's cause."""
    others = sites[1:]
    return f"; the same holds for {join_names(others, _OTHERS)}" if others else ""
