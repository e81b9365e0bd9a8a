"""From a float module to a graph with names: tracing that says what it could not reach, and float rewrites.

tracer    torch.fx with our leaves; what fails becomes opaque
arguments what is not passed keeps its default
example   shapes and types while tracing
attention torch's transformer modules, taken apart
simplify  in-place writes, identities, dropouts, unbind
fold      batch norms into the layer in front
names     every call a named module, every tensor a site
values    shapes and types, from an example
"""

from torch_frontend.tracing.arguments import given_arguments
from torch_frontend.tracing.attention import take_apart
from torch_frontend.tracing.fold import by_channel, factors, fold_batch_norms, folded, put
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
from torch_frontend.tracing.values import as_inputs, bound, evaluating, is_float, look, looked_at, shape_of, value_of

__all__ = [
    "Named",
    "Traced",
    "Untraceable",
    "as_inputs",
    "bound",
    "by_channel",
    "element_of",
    "evaluating",
    "factors",
    "fold_batch_norms",
    "folded",
    "fresh",
    "given_arguments",
    "is_constant",
    "is_float",
    "is_plain",
    "look",
    "looked_at",
    "name_calls",
    "named",
    "put",
    "remove_dead",
    "scope_of",
    "shape_of",
    "simplify",
    "site_of",
    "take_apart",
    "trace",
    "value_of",
]
