"""From a float module to a graph with names: tracing that reports the parts it cannot follow, and float rewrites.

tracer      torch.fx with our leaves; modules that fail become opaque; shapes and types from an example
capture     torch.export on an example, where symbols fail
leaves      layers kept whole in its graph
aten        ATen's operators as torch's functions
signature   arguments and results of the forward: checked in each run, or packed again
attention   torch's transformer modules as single products
simplify    in-place writes, identities, dropouts, unbind; addmm and einsum as products and sums
batch_norms functions as modules, and modules folded into the layer in front
names       every call a named module, every tensor a site
values      shapes and types, from an example
modules     modules, attributes and calls by their dotted paths

The tracer knows nothing of quantizers; `quant_model` places them on the graph that comes out.
"""
