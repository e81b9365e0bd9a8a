"""From a float module to a graph with names: tracing that reports the parts it cannot follow, and float rewrites.

tracer    torch.fx with our leaves; modules that fail become opaque
capture   torch.export on an example, where symbols fail
leaves    layers kept whole in its graph
aten      ATen's operators as torch's functions
signature arguments and results of the forward in that graph
modes     whether train and eval mode make the same calls
arguments defaults of arguments that are not passed, results of a kind of their own
example   shapes and types while tracing
attention torch's transformer modules as single products
products  addmm and einsum as products and sums
simplify  in-place writes, identities, dropouts, unbind
fold      batch norms into the layer in front
names     every call a named module, every tensor a site
values    shapes and types, from an example
modules   modules, attributes and calls by their dotted paths

The tracer knows nothing of quantizers; `quant_model` places them on the graph that comes out.
"""
