"""The networks of `motifs` for engines that run here: their answers must be what the file says.

OpenVINO, the emulated NPU and onnxruntime-web; one that is not installed runs nothing, and only the file is judged.
"""

from pathlib import Path
from random import Random

from tests.fuzz import motifs
from tests.fuzz.motifs import run_case

__all__ = ["make_case", "run_case"]

_PRESETS = ("openvino-int8", "qnn-int8", "web-int8") * 3 + (
    "openvino-int8-weights", "qnn-mixed", "qnn-a16w8", "web-dynamic", "web-int8-weights",
)  # fmt: skip


def make_case(rng: Random, folder: Path) -> str:
    """Write a network, its samples, and what is to be done with it."""
    return motifs.make_case(rng, folder, _PRESETS)
