"""Edits on a model: its wiring as graphsurgeon objects, changed by name, written back as a ModelProto.

onnx-graphsurgeon is kept from writing to the terminal, which belongs to the report. Its errors still raise.
"""

import onnx_graphsurgeon as gs
from onnx_graphsurgeon.logger import G_LOGGER

G_LOGGER.severity = G_LOGGER.CRITICAL

__all__ = ["gs"]
