"""Scales and zero points of weights: each weight is read, searched and let go of, here or by the workers of a crew.

A large weight is a piece of work, and small neighbours share one, whoever does it: so the numbers are the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxq.calibrate.constants import Numbers, find_tensor, locate_constant, name_site, read_constant
from onnxq.calibrate.importance import estimate_importance
from onnxq.graph import GraphIndex
from onnxq.graph.light import is_large_model
from onnxq.graph.stored import Spool, StoredArray
from onnxq.numerics import floor_weight_scale, weight_qparams
from onnxq.numerics.saturation import SumOrder
from onnxq.plan import SitePlan
from onnxq.progress import Progress, silent
from onnxq.runtime.crew import AnyArray, Crew, hash_array, hash_parts, open_array
from onnxq.sites import Role, Site
from onnxq.spec import ObserverSpec, QParams, QuantSpec
from onnxq.workers import Piece

# Megabytes of float values that small weights share a piece up to: a second's search at most.
_PIECE_MB = 16


@dataclass(frozen=True, eq=False)
class WeightTask:
    """One weight to be searched. site: for errors. importance: as of `weight_qparams`."""

    site: str
    values: AnyArray
    spec: QuantSpec
    observer: ObserverSpec | None
    orders: tuple[SumOrder, ...]
    importance: NDArray[np.float32] | None


def weight_numbers(
    index: GraphIndex,
    missing: Sequence[SitePlan],
    biases: Iterable[SitePlan],
    numbers: Numbers,
    progress: Progress = silent,
    crew: Crew | None = None,
) -> dict[Site, QParams]:
    """Scales and zero points of the missing weight sites.

    missing: sites without numbers, of any role. biases: sites whose scale derives from weights. numbers: those known
    already, activations included. crew: searches the weights; the result does not depend on it.
    Raises PlanError where a weight is no constant, CalibrationError for NaN or inf in it.
    """
    weights = [site for site in missing if site.role is Role.WEIGHT]
    found = dict(_search_weights(index, weights, crew or Crew(), progress)) if weights else {}
    for bias in biases:
        if bias.derived is None:
            continue
        x, w = bias.derived
        # A bias on a scale too small for it would overflow int32, so the weight's scale is raised.
        if w in found and x in numbers:
            value = read_constant(index, bias)
            with name_site(str(bias.site)):
                scale = floor_weight_scale(found[w].scale, numbers[x].scale, value)
            found[w] = replace(found[w], scale=scale)
    first: dict[str, QParams] = {}
    for site in missing:
        # Of a weight and the table that it is the transpose of, the weight's scales serve both.
        if site.group and site.site in found:
            shared = first.setdefault(site.group, found[site.site])
            found[site.site] = replace(shared, computed_for=site.spec.levels)
    return found


def _search_weights(
    index: GraphIndex, weights: Sequence[SitePlan], crew: Crew, progress: Progress
) -> Iterator[tuple[Site, QParams]]:
    """Each site with its numbers. Steps name the tensor; they are megabytes of all.

    Of a large model the numbers go to a temporary file: scales of blocks of 32 weights are a quarter of their file.
    """
    spool = Spool() if is_large_model(index.proto) else None
    sizes = [_count_megabytes(index, site) for site in weights]
    # Alone in this process each weight is a step, so that its name is shown.
    groups = _group_weights(sizes, 0 if crew.plain else _PIECE_MB)
    with progress("scales of weights, MB", sum(sizes)) as task:
        pieces = []
        for group in groups:
            tasks = tuple(_describe_weight(index, weights[k], crew) for k in group)
            title = tasks[0].site if len(tasks) == 1 else f"{tasks[0].site} and {len(tasks) - 1} more"
            key = ""
            if crew.workers.journal is not None:
                with progress(f"hashing weights: {title}"):
                    key = _hash_tasks(tasks, [locate_constant(index, weights[k]) for k in group])
            pieces.append(Piece(title, tasks, key))
        results = crew.map(search_piece, pieces)
        for group, piece in zip(groups, pieces, strict=True):
            size = sum(sizes[k] for k in group)
            with progress(f"scales of weights: {piece.title}, {size} MB"):
                found = next(results)
            for k, numbers in zip(group, found, strict=True):
                yield weights[k].site, numbers if spool is None else _spool_numbers(numbers, spool)
            task.advance(size)


def _spool_numbers(numbers: QParams, spool: Spool) -> QParams:
    scale, zero = (spool.write(part).map() for part in (numbers.scale, numbers.zero_point))
    return replace(numbers, scale=scale, zero_point=zero)


def search_piece(tasks: Sequence[WeightTask]) -> list[QParams]:
    """The numbers of some weights, in order."""
    return [_search_weight(one) for one in tasks]


def _search_weight(task: WeightTask) -> QParams:
    values = open_array(task.values)
    with name_site(task.site):
        return weight_qparams(values, task.spec, observer=task.observer, orders=task.orders, importance=task.importance)


def _count_megabytes(index: GraphIndex, site: SitePlan) -> int:
    """Of the float values; at least 1, so that small ones count too."""
    dims = index.shape(find_tensor(index, site.site)) or ()
    return max(1, 4 * math.prod(dim for dim in dims if isinstance(dim, int)) // 10**6)


def _group_weights(sizes: Sequence[int], most: int) -> list[range]:
    """Runs of neighbours of at most so many megabytes together, or of one weight."""
    starts, held = [0], 0
    for k, size in enumerate(sizes):
        if k > starts[-1] and held + size > most:
            starts.append(k)
            held = 0
        held += size
    return [range(*ends) for ends in zip(starts, [*starts[1:], len(sizes)], strict=True)]


def _describe_weight(index: GraphIndex, site: SitePlan, crew: Crew) -> WeightTask:
    values = locate_constant(index, site)
    importance = estimate_importance(index, site, values.shape)
    return WeightTask(
        str(site.site), crew.share_array(values), site.spec, site.observer, tuple(site.sum_orders), importance
    )


def _hash_tasks(tasks: Sequence[WeightTask], values: Sequence[NDArray[Any] | StoredArray]) -> str:
    """Of all that the numbers depend on; not of names."""
    parts: list[bytes | memoryview] = [f"weights {version('onnxq')} {np.__version__}".encode()]
    for one, array in zip(tasks, values, strict=True):
        parts.append(repr((array.dtype, array.shape, one.spec, one.observer, one.orders)).encode())
        parts += [hash_array(array).encode(), b"" if one.importance is None else one.importance.tobytes()]
    return hash_parts(*parts)
