"""The numbers of a plan in another tool's file, and for each site whether the file has them as they are."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from onnxq.errors import CalibrationError
from onnxq.graph import FLOAT_TENSORS, GraphIndex
from onnxq.interop.base import ImportFormat, TensorScale
from onnxq.interop.fitting import describe_kind
from onnxq.plan import SitePlan, SitePlans
from onnxq.sites import Caution, Cautions, MaybeTensor, Names, TensorId, drop_repeats
from onnxq.wording import join_names, show_as_summary

# Names that a text lists where there are more.
_SHOWN = 4


@dataclass(frozen=True, kw_only=True)
class WrittenSite:
    """A site and the tensor under whose name its numbers stand in the file.

    change: how the file's own reading of them differs; "" where it gives the same values.
    """

    site: str
    tensor: str
    change: str = ""


@dataclass(frozen=True, kw_only=True)
class LeftSite:
    """A site that the file does not have, with the reason."""

    site: str
    tensor: str
    reason: str


@show_as_summary
@dataclass(frozen=True, kw_only=True)
class ExportedScales:
    """A file of scales for another tool, and the account of every site.

    kind: the format's name. content: the file. uncovered: float tensors of the network without an entry; None where the
    network was not given. out: where it was written; "": nowhere.
    """

    source: str
    kind: str
    content: bytes
    written: tuple[WrittenSite, ...]
    left: tuple[LeftSite, ...] = ()
    uncovered: Names | None = None
    scaled: Names = ()
    out: str = ""

    @property
    def complete(self) -> bool:
        """True where the file has the numbers of every site as they are."""
        return not self.left and not any(site.change for site in self.written)

    @property
    def warnings(self) -> Cautions:
        """Sites and tensors that the file lacks, which nobody who reads it is told of."""
        cautions = []
        if self.left:
            counts = Counter(site.reason for site in self.left).most_common(_SHOWN)
            text = "; ".join(f"{count}: {reason}" for reason, count in counts)
            cautions.append(Caution("W143", f"{len(self.left)} sites are not in the file: {text}"))
        if self.uncovered:
            shown = join_names(self.uncovered, _SHOWN)
            text = "have no entry, and tools that read the file find ranges of their own for them"
            cautions.append(Caution("W144", f"{len(self.uncovered)} float tensors {text}: {shown}"))
        if self.scaled:
            shown = join_names(self.scaled, _SHOWN)
            text = (
                f"the numbers are of a model whose channels are scaled at {shown}: use them with what `onnxq convert` "
                "of the quantized file to `float` writes, not with the original"
            )
            cautions.append(Caution("W151", text))
        return tuple(cautions)


def write_scales(sites: SitePlans, kind: ImportFormat, source: str = "the plan") -> ExportedScales:
    """The numbers of sites in a format. What was written is read again, so that the account is of the file itself.

    Raises CalibrationError for a format that is only read, and where it has no place for any site.
    """
    if kind.write is None:
        raise CalibrationError(
            f"format {kind.name!r}", "is only read", "name another: docs/formats.md", code="Q516"
        )
    left = []
    chosen = []
    for site, entry, reason in _list_entries(sites):
        reason = reason or (kind.refuse(entry) if entry is not None else "")
        if entry is None or reason:
            left.append(LeftSite(site=site.name, tensor=site.quantized_tensor.name, reason=reason))
        else:
            chosen.append((site, entry))
    if not chosen:
        first = f"; {left[0].site}: {left[0].reason}" if left else ""
        cause = f"has no site that {kind.name} can hold{first}"
        raise CalibrationError(source, cause, "choose another format: docs/formats.md", code="Q517")
    # Sites of one tensor with the same numbers share an entry, in the order of the plan.
    unique = list({(entry.name, entry.readers): entry for _, entry in chosen}.values())
    content = kind.write(unique)
    again = {(entry.name, entry.readers): entry for entry in kind.parse(content, kind.name).entries}
    written = tuple(
        WrittenSite(
            site=site.name,
            tensor=entry.name,
            change=_describe_change(entry, again.get((entry.name, entry.readers))),
        )
        for site, entry in chosen
    )
    return ExportedScales(
        source=source, kind=kind.name, content=content, written=written, left=tuple(left)
    )


def _list_entries(sites: Iterable[SitePlan]) -> Iterator[tuple[SitePlan, TensorScale | None, str]]:
    """(site, its entry, why it has none) of each site."""
    grouped: dict[str, list[TensorScale]] = {}
    # Sites that all readers share come first: the others are exceptions to them.
    for site in sorted(
        sites, key=lambda site: site.consumers is not None or not isinstance(site.site, TensorId)
    ):
        reason = _find_obstacle(site)
        if reason or site.qparams is None:
            yield site, None, reason
            continue
        name = site.quantized_tensor.name
        entry = TensorScale(
            name, site.qparams.scale, 0, site.qparams.zero_point, site.spec, site.role
        )
        # Pairs of several readers with the same numbers are one entry.
        group = grouped.setdefault(name, [])
        same = next((other for other in group if is_same_grid(entry, other)), None)
        if same is None:
            same = replace(entry, readers=_list_readers(site)) if group else entry
            group.append(same)
        yield site, same, "" if len(group) <= 2 else "a third kind of numbers on one tensor"


def _list_readers(site: SitePlan) -> Names:
    edges = site.consumers if isinstance(site.site, TensorId) else (site.site,)
    return drop_repeats(edge.node for edge in edges or ())


def _find_obstacle(site: SitePlan) -> str:
    if site.spec.dynamic:
        return "its scale is computed at each run"
    if site.qparams is None:
        return "it has no numbers: the plan is not calibrated"
    if site.qparams.minimum is not None or site.qparams.order is not None:
        return "blocks of a checkpoint that begin at a float, or lie in another order"
    if site.site.scope:
        return f"it lies in the body {site.site.scope}, and files name tensors of the main graph"
    return ""


def is_same_grid(entry: TensorScale, other: TensorScale) -> bool:
    """True where both round a tensor to the same values, under integers of either sign."""
    if entry.spec.is_float != other.spec.is_float or not np.array_equal(entry.scale, other.scale):
        return False
    return all(map(np.array_equal, _list_ends(entry), _list_ends(other)))


def _list_ends(entry: TensorScale) -> tuple[np.ndarray, np.ndarray]:
    """The levels of an entry, counted from its zero."""
    zero = np.broadcast_to(entry.zero_point, np.shape(entry.scale)).astype(np.int64)
    return entry.spec.qmin - zero, entry.spec.qmax - zero


def _describe_change(entry: TensorScale, again: TensorScale | None) -> str:
    # A format may leave out what its reader takes for granted.
    if again is None:
        return "the file says nothing of its integers"
    if is_same_grid(entry, again):
        return ""
    if not np.array_equal(entry.scale, again.scale):
        return "another scale"
    low, high = (int(np.min(side)) for side in _list_ends(again))
    return f"{describe_kind(entry.spec)} as levels {low}…{high} around its zero"


def list_uncovered(index: GraphIndex, entries: Iterable[str]) -> Names:
    """Float tensors of the main graph without an entry: tools that find a file find ranges of their own for these."""
    # In the order of the network, in which people look for them.
    named = set(entries)
    # The float values behind a model output, whose name the pair's result has.
    named |= {
        node.inputs[0]
        for node in index.nodes
        if node.op_type == "Identity" and node.outputs[0] in named
    }
    tensors: dict[str, None] = {}
    for node in index.nodes:
        if node.scope or node.op_type == "Constant":
            continue
        for name in node.inputs + node.outputs:
            if name in named:
                continue
            tensor = index.resolve_tensor(name, "") if name else None
            if index.find_dtype(tensor) in FLOAT_TENSORS and _is_data(index, tensor):
                tensors.setdefault(name)
    return tuple(tensors)


def _is_data(index: GraphIndex, tensor: MaybeTensor) -> bool:
    """True for a computed tensor, and for a constant that is more than one number."""
    shape = index.find_shape(tensor)
    return not index.is_constant(tensor) or bool(
        shape and np.prod([d if isinstance(d, int) else 1 for d in shape]) > 1
    )
