"""Models as files and graphs: load and save, names, an index by identity, edits, rewrites, verification.

The only user of onnx-graphsurgeon. Stages hand each other light models (see light.py), files and callers ModelProtos.
"""

from __future__ import annotations

from onnxq.graph.dense import store_densely
from onnxq.graph.editing.editor import Editor
from onnxq.graph.folding.fold import fold_constants
from onnxq.graph.functions import inline_functions
from onnxq.graph.identity import Fingerprint, fingerprint, graph_digest, structural_ids
from onnxq.graph.index import GraphIndex, NodeRef, ValueInfo, index_of, opset_of
from onnxq.graph.light import LightModel, ModelLike, WeightStore, attach_weights, strip_weights
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
    "LightModel",
    "Model",
    "ModelLike",
    "NodeRef",
    "ValueInfo",
    "WeightStore",
    "at_opset",
    "attach_weights",
    "fingerprint",
    "fold_constants",
    "graph_digest",
    "index_of",
    "infer_shapes",
    "inline_functions",
    "load_model",
    "name_nodes",
    "opset_of",
    "save_model",
    "store_densely",
    "strip_weights",
    "structural_ids",
    "upgrade_opset",
    "verify",
]
