"""Constants of a model, and the scales and zero points of biases, which derive from their weight and input."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from numpy.typing import NDArray

from onnxq.errors import ConfigError, OnnxqError, PlanError
from onnxq.graph import GraphIndex
from onnxq.graph.storage.stored import StoredArray
from onnxq.numerics import bias_qparams
from onnxq.plan import SitePlan
from onnxq.sites import Role, Site, TensorId
from onnxq.spec import QParams

Numbers = Mapping[Site, QParams]


def find_tensor(index: GraphIndex, site: Site) -> TensorId:
    """The tensor that a site quantizes. Raises PlanError where the model does not have it."""
    if isinstance(site, TensorId):
        if index.resolve(site.name, site.scope) != site:
            raise PlanError(str(site), "the model has no such tensor", "plan this model again", code="Q404")
        return site
    node = index.node(site.node)
    name = node.inputs[site.index] if site.index < len(node.inputs) else ""
    found = index.resolve(name, node.scope)
    if found is None:
        raise PlanError(str(site), "this input is not connected in the model", "plan this model again", code="Q404")
    return found


def bias_numbers(index: GraphIndex, missing: Iterable[SitePlan], numbers: Numbers) -> dict[Site, QParams]:
    """Scales and zero points of the missing bias sites whose input and weight have theirs."""
    found: dict[Site, QParams] = {}
    for site in missing:
        if site.role is not Role.BIAS:
            continue
        if site.derived is None:
            raise PlanError(
                str(site.site), "a bias needs the activation and the weight it derives from", "plan again", code="Q403"
            )
        x, w = site.derived
        if x in numbers and w in numbers:
            count = read_constant(index, site).size
            with name_site(str(site.site)):
                found[site.site] = bias_qparams(numbers[x], numbers[w], count)
    return found


def read_constant(index: GraphIndex, site: SitePlan) -> NDArray[Any]:
    """The values of the constant that a site quantizes. Raises PlanError where it is none."""
    value = locate_constant(index, site)
    return value.map() if isinstance(value, StoredArray) else value


def locate_constant(index: GraphIndex, site: SitePlan) -> NDArray[Any] | StoredArray:
    """The same, or where they lie in a file."""
    value = index.locate_constant(find_tensor(index, site.site))
    if value is None:
        raise PlanError(
            str(site.site), f"is not a constant, as a {site.role} must be", "plan this model again", code="Q404"
        )
    return value


@contextmanager
def name_site(site: str) -> Iterator[None]:
    """Name the site in an error of numerics, which sees arrays only."""
    try:
        yield
    except ConfigError as error:
        # Its subject is the setting at fault.
        raise error.replace_text(subject=f"{site}: {error.subject}") from error
    except OnnxqError as error:
        raise error.replace_text(subject=site) from error
