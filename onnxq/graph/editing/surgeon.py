"""onnx-graphsurgeon, kept from writing to the terminal, which belongs to the report. Its errors still raise."""

from __future__ import annotations

import onnx_graphsurgeon as gs
from onnx_graphsurgeon.logger import G_LOGGER

G_LOGGER.severity = G_LOGGER.CRITICAL

__all__ = ["gs"]
