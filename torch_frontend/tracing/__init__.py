"""From a float module to a graph with names: tracing that says what it could not reach, and float rewrites.

tracer    torch.fx with our leaves; what fails becomes opaque
simplify  in-place writes, identities, dropouts, unbind
names     every call a named module, every tensor a site
values    shapes and types, from an example
"""

from torch_frontend.tracing.names import (
    Named,
    element_of,
    fresh,
    is_constant,
    is_plain,
    name_calls,
    named,
    scope_of,
    site_of,
)
from torch_frontend.tracing.simplify import remove_dead, simplify
from torch_frontend.tracing.tracer import Traced, Untraceable, trace
from torch_frontend.tracing.values import as_inputs, bound, evaluating, is_float, look, looked_at, shape_of

__all__ = [
    "Named",
    "Traced",
    "Untraceable",
    "as_inputs",
    "bound",
    "element_of",
    "evaluating",
    "fresh",
    "is_constant",
    "is_float",
    "is_plain",
    "look",
    "looked_at",
    "name_calls",
    "named",
    "remove_dead",
    "scope_of",
    "shape_of",
    "simplify",
    "site_of",
    "trace",
]
