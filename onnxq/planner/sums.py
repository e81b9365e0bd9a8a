"""The constants at a plan's sites: read, hashed, and kept within the 16-bit sums of the kernels of its target."""

import hashlib
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from onnxq.arrays import Array, as_float32
from onnxq.backends import find_backend, find_target
from onnxq.graph import GraphIndex
from onnxq.graph.precision.widen import is_narrow
from onnxq.numerics import SumOrders, align_qparams, find_saturating_sums, limit_sums, needs_bound
from onnxq.plan import Plan, SitePlan
from onnxq.sites import Caution, Cautions, Site, drop_repeats


def warn_allowed(target: str, saturation: str) -> Cautions:
    """The warning of sums that may overflow in the kernels of a target; none where its kernels keep them."""
    if saturation != "allow" or not find_target(target).saturates:
        return ()
    text = (
        f"saturation: allow: on x86 CPUs without VNNI, kernels of {find_backend(target).title} add two products "
        "of this file's weights in 16 bits, which overflow: other answers there than here. `onnxq prove` with samples "
        "says by how much"
    )
    return (Caution("W102", text),)


def bind_sums(plan: Plan, index: GraphIndex) -> Plan:
    """The plan with the sum orders of every weight that its target multiplies by 8-bit activations.

    Integers stay as they are: `mend_sums` checks them. Nothing is bound where the plan allows saturation.
    """
    engine = find_target(plan.target)
    sites = (site for site in plan.all_sites if not site.role.is_constant)
    narrow = (site for site in sites if site.spec.storage_bits == 8 and not site.spec.is_float)
    # Only data at input 0 meets the weight; a bias of 8 bits does not count.
    multiplying = frozenset(
        edge.node for site in narrow for edge in site.find_readers(index) if edge.index == 0
    )

    def list_orders(site: SitePlan) -> SumOrders:
        if plan.saturation == "allow" or not site.role.is_weight or not needs_bound(site.spec):
            return ()
        value = read_constant(index, site.site)
        if value is None:
            return ()
        # Readers of float data, or of 16 bits, never use the instruction that saturates.
        nodes = [
            index.find_node(edge.node) for edge in site.named_consumers if edge.node in multiplying
        ]
        return drop_repeats(
            # Readers of different kinds add different neighbours; the weight has to satisfy all of
            # them.
            order
            for node in nodes
            for order in engine.list_sum_orders(node, value.shape)
        )

    return plan.with_sites(replace(site, sum_orders=list_orders(site)) for site in plan.sites)


def mend_sums(plan: Plan, index: GraphIndex) -> tuple[Plan, Cautions]:
    """The bound plan with integers that keep every sum, and a line for each weight whose integers changed.

    For plans that people edited, other tools trained or older versions wrote. Scales stay as they are.
    """
    sites = []
    lines = []
    for site in plan.sites:
        values = site.values
        qparams = site.qparams
        rows, sums = (0, 0) if values is None else count_saturating(values, site.sum_orders)
        if values is not None and qparams is not None and sums:
            scale, zero = align_qparams(qparams, site.spec, values.shape, np.float32)
            weight = read_constant(index, site.site)
            near = values if weight is None else as_float32(weight) / scale + zero
            # Rounding may have had its reasons: what it chose is what to stay near to, not the float weight.
            wanted = np.where(abs(near - values) < 1, near, values)
            site = replace(site, values=limit_sums(values, wanted, site.sum_orders))
            text = (
                f"{site.site}: {sums} sums in {rows} rows of its integers would overflow 16 bits on CPUs without "
                "VNNI: moved to the nearest that do not; quantize again for scales chosen with that in mind"
            )
            lines.append(Caution("W107", text))
        sites.append(site)
    return plan.with_sites(sites), tuple(lines)


def count_saturating(values: np.ndarray, orders: SumOrders) -> tuple[int, int]:
    """(rows, sums) of integer weights that can overflow, over all the orders they are read in."""
    saturating = [find_saturating_sums(values, order) for order in orders]
    return sum(int(sums.any(axis=1).sum()) for sums in saturating), sum(
        int(sums.sum()) for sums in saturating
    )


def read_constant(index: GraphIndex, site: Site | None) -> Array | None:
    """The value of the constant that a site quantizes; None where it is none."""
    return index.find_constant(index.find_at(site))


def digest_weights(sites: Iterable[SitePlan], index: GraphIndex) -> str:
    """sha256 of the weights at these sites, in their order: the same however the graph around them is written."""
    digest = hashlib.sha256()
    for site in sites:
        if not site.role.is_weight:
            continue
        value = read_constant(index, site.site)
        if value is not None:
            # A model in a narrower type is planned, and carried out, in float32.
            value = as_float32(value) if is_narrow(value.dtype) else value
            digest.update(f"{value.dtype.str}{value.shape}".encode())
            digest.update(np.ascontiguousarray(value).tobytes())
    return digest.hexdigest()
