"""The formats of checkpoints that `import-weights` reads. Another one is a file that defines it and a row here."""

from __future__ import annotations

import json
from pathlib import Path

from onnxq.errors import CalibrationError
from onnxq.files import read_text
from onnxq.interop.checkpoints.awq import AWQ
from onnxq.interop.checkpoints.base import Checkpoint, CheckpointFiles, CheckpointFormat, fault
from onnxq.interop.checkpoints.compressed import COMPRESSED
from onnxq.interop.checkpoints.gguf import GGUF
from onnxq.interop.checkpoints.gptq import GPTQ
from onnxq.interop.checkpoints.tensors import list_tensors

# The first one that recognizes the files reads them.
CHECKPOINTS: tuple[CheckpointFormat, ...] = (GGUF, GPTQ, AWQ, COMPRESSED)
# Files with the quantization configuration: on its own, or in the key of the name below.
_CONFIGS = ("quantize_config.json", "quant_config.json", "config.json")
_KEYS = ("quantization_config", "compression_config")
_MOST_BYTES = 64 * 2**20
_KINDS = "GPTQ, AWQ and compressed-tensors in safetensors, and GGUF, are"


def open_checkpoint(source: str | Path) -> Checkpoint:
    """List the quantized weights of a folder or file. Raises CalibrationError for what is none, or is broken."""
    path = Path(source)
    if not path.exists():
        raise fault(path, "does not exist", "name the folder of the checkpoint, or its .gguf file")
    inside = sorted(path.iterdir()) if path.is_dir() else [path]
    stored = [file for file in inside if file.suffix == ".safetensors"]
    ggufs = tuple(file for file in inside if file.suffix == ".gguf")
    settings = _read_settings(path if path.is_dir() else path.parent) if stored else {}
    files = CheckpointFiles(path, settings, list_tensors(stored), () if stored else ggufs)
    chosen = next((row for row in CHECKPOINTS if row.recognizes(files)), None)
    if chosen is None:
        method = settings.get("quant_method")
        cause = (
            f"holds weights of {method!r}: {_KINDS} read" if method else f"is no quantized checkpoint: {_KINDS} read"
        )
        fix = "name the folder of the checkpoint, or its .gguf file"
        if any(file.suffix in (".bin", ".pt", ".pth") for file in inside) and not stored:
            fix = "save it as safetensors: `model.save_pretrained(folder, safe_serialization=True)`"
        raise fault(path, cause, fix)
    checkpoint = chosen.read(files)
    if not checkpoint.weights and not checkpoint.refused:
        raise fault(path, "holds no quantized weight", "name the folder of the quantized checkpoint")
    return checkpoint


def _read_settings(folder: Path) -> dict[str, object]:
    """The quantization configuration beside the tensors; {} for none."""
    settings: dict[str, object] = {}
    for name in _CONFIGS:
        if (folder / name).is_file():
            text = read_text(folder / name, CalibrationError, "download it again", limit=_MOST_BYTES, code="Q514")
            try:
                values = json.loads(text)
            except json.JSONDecodeError as error:
                raise fault(folder / name, f"is no JSON ({error})", "download it again") from error
            own = name != _CONFIGS[-1]
            nested = next((values[key] for key in _KEYS if isinstance(values.get(key), dict)), None)
            settings = {**(nested or (values if own else {})), **settings}
    return settings
