"""Models as files and graphs: load and save, names, an index by identity, edits, rewrites, verification.

The only user of onnx-graphsurgeon. ModelProto is what stages hand to each other.
"""

from __future__ import annotations

from onnxq.graph.dense import store_densely
from onnxq.graph.editor import Editor
from onnxq.graph.fold import fold_constants
from onnxq.graph.functions import inline_functions
from onnxq.graph.held import filled, hold, holding
from onnxq.graph.identity import Fingerprint, fingerprint, graph_digest, structural_ids
from onnxq.graph.index import GraphIndex, NodeRef, ValueInfo, index_of, opset_of
from onnxq.graph.load import Model, load_model
from onnxq.graph.names import name_nodes
from onnxq.graph.opset import at_opset, upgrade_opset
from onnxq.graph.protocol import Graph
from onnxq.graph.save import save_model
from onnxq.graph.shapes import infer_shapes
from onnxq.graph.verify import verify

__all__ = [
    "Editor",
    "Fingerprint",
    "Graph",
    "GraphIndex",
    "Model",
    "NodeRef",
    "ValueInfo",
    "at_opset",
    "filled",
    "fingerprint",
    "fold_constants",
    "graph_digest",
    "hold",
    "holding",
    "index_of",
    "infer_shapes",
    "inline_functions",
    "load_model",
    "name_nodes",
    "opset_of",
    "save_model",
    "store_densely",
    "structural_ids",
    "upgrade_opset",
    "verify",
]
