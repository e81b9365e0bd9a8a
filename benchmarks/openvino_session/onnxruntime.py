"""OpenVINO by the name of onnxruntime: with this folder in front of PYTHONPATH, a scorer of a corpus runs models in it.

It has what such scorers use: sessions that run, the names of outputs, and the metadata of ONNX files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import openvino

# On CPUs with AMX it would compute in bfloat16 what stays float.
SETTINGS = {"INFERENCE_PRECISION_HINT": "f32"}


class SessionOptions(SimpleNamespace):
    """Settings that OpenVINO has no use for."""


class GraphOptimizationLevel:
    """Levels that OpenVINO has no use for."""

    ORT_DISABLE_ALL = 0


class InferenceSession:
    """A model in OpenVINO's plugin for x86."""

    def __init__(self, path: str, *_: Any, **__: Any) -> None:
        core = openvino.Core()
        self._path = Path(path)
        self._model = core.compile_model(core.read_model(path), "CPU", SETTINGS)

    def run(self, _: Any, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """The outputs in the model's order."""
        return list(map(np.array, self._model(dict(feeds)).values()))

    def get_outputs(self) -> list[SimpleNamespace]:
        """The outputs by name."""
        return [SimpleNamespace(name=value.get_any_name()) for value in self._model.outputs]

    def get_modelmeta(self) -> SimpleNamespace:
        """The metadata of an ONNX file."""
        entries = onnx.load(self._path, load_external_data=False).metadata_props
        return SimpleNamespace(custom_metadata_map={entry.key: entry.value for entry in entries})
