"""Names of the nodes and tensors of a pair, all made from the name of its site."""

from onnxq.graph.base import DEQUANTIZE, DYNAMIC, QUANTIZE
from onnxq.sites import Site, TensorId

# Part of a pair -> its suffix; a pair's nodes are `<site>/QuantizeLinear` and `<site>/DequantizeLinear`.
PARTS = {
    "q_node": f"/{QUANTIZE}",
    "dq_node": f"/{DEQUANTIZE}",
    "dynamic_node": f"/{DYNAMIC}",
    "clip_node": "/Clip",
    "floor_node": "/Max",
    "cast_node": "/Cast",
    "transpose_node": "/Transpose",
    # The data in the order of a weight's rows.
    "order_node": "/order/Gather",
    "order": "/order",
    "ordered": "/ordered",
    # 4-bit integers in the file, in front of the Cast that makes bytes of them.
    "packed": "/packed",
    "quantized": "/quantized",
    "dequantized": "/dequantized",
    "clipped": "/clipped",
    # The float values of a model output, whose own name the dequantized tensor keeps.
    "float": "/float",
    # A looked-up row: its scale, gathered and as a column, and the nodes that dequantize it.
    "row_scale_node": "/row_scale/Gather",
    "row_scale": "/row_scale",
    "column_node": "/row_scale/Unsqueeze",
    "column": "/row_scale/column",
    "last_axis": "/row_scale/axis",
    "row": "/row",
    "row_node": "/Mul",
    "float_node": "/float/Cast",
    "scale": "/scale",
    "zero_point": "/zero_point",
    "clip_min": "/clip_min",
    "clip_max": "/clip_max",
}


def is_clipped_part(tensor: str) -> bool:
    """True for the name of the result of the Clip in a site's pair."""
    return tensor.endswith(PARTS["clipped"])


def name_part(site: Site, name: str) -> str:
    """The name of one part of a site's pair, e.g. name_part(TensorId("x"), "scale") == "x/scale".

    It begins with the tensor's name, or with `<node>/in<k>` for an edge.
    """
    base = site.name if isinstance(site, TensorId) else f"{site.node}/in{site.index}"
    return base + PARTS[name]
