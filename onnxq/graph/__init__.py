"""Models as files and graphs: load and save, names, an index by identity, edits, rewrites, verification.

The only user of onnx-graphsurgeon. ModelProto is what stages hand to each other.
"""

from __future__ import annotations

from onnxq.graph.editor import Editor
from onnxq.graph.index import GraphIndex, NodeRef, ValueInfo, opset_of
from onnxq.graph.load import Model, load_model
from onnxq.graph.names import name_nodes

__all__ = ["Editor", "GraphIndex", "Model", "NodeRef", "ValueInfo", "load_model", "name_nodes", "opset_of"]
