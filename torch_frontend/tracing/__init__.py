"""From a float module to a graph with names: tracing that reports the parts it cannot follow, and float rewrites.

tracer    torch.fx with our leaves; modules that fail become opaque
arguments defaults of arguments that are not passed
example   shapes and types while tracing
attention torch's transformer modules as single products
simplify  in-place writes, identities, dropouts, unbind
fold      batch norms into the layer in front
names     every call a named module, every tensor a site
values    shapes and types, from an example
modules   modules, attributes and calls by their dotted paths
"""

# The tracer knows nothing of quantizers; `quant_model` places them on the graph that comes out.
from torch_frontend.tracing.arguments import given_arguments
from torch_frontend.tracing.attention import take_apart
from torch_frontend.tracing.fold import factors, fold_batch_norms, folded
from torch_frontend.tracing.modules import find_module, put, read_attribute, run_call, split_path
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
from torch_frontend.tracing.simplify import simplify
from torch_frontend.tracing.tracer import Traced, Untraceable, trace
from torch_frontend.tracing.values import as_inputs, bound, evaluating, is_float, look, looked_at, shape_of, value_of

__all__ = [
    "Named",
    "Traced",
    "Untraceable",
    "as_inputs",
    "bound",
    "element_of",
    "evaluating",
    "factors",
    "find_module",
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
    "read_attribute",
    "run_call",
    "scope_of",
    "shape_of",
    "simplify",
    "site_of",
    "split_path",
    "take_apart",
    "trace",
    "value_of",
]
