"""Models as files and graphs: load and save, names, an index by identity, edits, rewrites, verification.

The only user of onnx-graphsurgeon. Stages hand each other light models (see light.py), files and callers ModelProtos.
"""

from onnxq.graph.base import (
    DEQUANTIZE,
    FLOAT_TENSORS,
    LAYOUT_OPS,
    MICROSOFT,
    MOVING_OPS,
    QUANTIZE,
    Dims,
    Graph,
    MaybeNode,
    NodeRef,
    NodeRefs,
    ValueInfo,
    ValueInfos,
)
from onnxq.graph.convert import ensure_opset, fix_noise, inline_functions
from onnxq.graph.editing.editor import Editor
from onnxq.graph.folding.fold import fold_constants
from onnxq.graph.identity import compute_fingerprint, compute_structural_ids
from onnxq.graph.index import GraphIndex, find_opset, get_index
from onnxq.graph.integer_products import read_integer_products
from onnxq.graph.light import (
    LightModel,
    ModelLike,
    add_libraries,
    attach_weights,
    bare_proto,
    copy_proto,
    is_large_model,
    rebuild,
    strip_weights,
)
from onnxq.graph.load import Model, ModelSource, load_model
from onnxq.graph.names import choose_name, name_file, name_nodes
from onnxq.graph.precision.widen import SourceTypes, emulate_types, read_types, widen_model
from onnxq.graph.save import save_model
from onnxq.graph.scopes import drop_named, keep_named, walk_all_nodes, walk_from, walk_graphs
from onnxq.graph.shapes import fix_sizes, infer_shapes
from onnxq.graph.storage import TENSOR_TYPES, release_pages
from onnxq.graph.subgraph import Cutter
from onnxq.graph.verify import verify_graph

__all__ = [
    "DEQUANTIZE",
    "FLOAT_TENSORS",
    "LAYOUT_OPS",
    "MICROSOFT",
    "MOVING_OPS",
    "QUANTIZE",
    "TENSOR_TYPES",
    "Cutter",
    "Dims",
    "Editor",
    "Graph",
    "GraphIndex",
    "LightModel",
    "MaybeNode",
    "Model",
    "ModelLike",
    "ModelSource",
    "NodeRef",
    "NodeRefs",
    "SourceTypes",
    "ValueInfo",
    "ValueInfos",
    "add_libraries",
    "attach_weights",
    "bare_proto",
    "choose_name",
    "compute_fingerprint",
    "compute_structural_ids",
    "copy_proto",
    "drop_named",
    "emulate_types",
    "ensure_opset",
    "find_opset",
    "fix_noise",
    "fix_sizes",
    "fold_constants",
    "get_index",
    "infer_shapes",
    "inline_functions",
    "is_large_model",
    "keep_named",
    "load_model",
    "name_file",
    "name_nodes",
    "read_integer_products",
    "read_types",
    "rebuild",
    "release_pages",
    "save_model",
    "strip_weights",
    "verify_graph",
    "walk_all_nodes",
    "walk_from",
    "walk_graphs",
    "widen_model",
]
