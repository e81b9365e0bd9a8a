"""The child process that builds a TensorRT engine: `python -m onnxq.engines.diff.build JOB.json`."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

from onnxq.engines.build.child import end_with_parent
from onnxq.engines.diff.results import polygraphy
from onnxq.engines.diff.trt import Job, choose_library


def main(path: str) -> int:
    """Build the engine that a Job describes; TensorRT's complaints go to stdout."""
    end_with_parent()
    job = Job(**json.loads(Path(path).read_text(encoding="utf-8")))
    choose_library(job.library)
    logger = polygraphy("logger").G_LOGGER
    logger.module_severity = logger.ERROR
    logger.colors = False
    backend = polygraphy("backend.trt")
    profile = backend.Profile()
    for name, (low, first, high) in job.shapes.items():
        profile.add(name, min=tuple(low), opt=tuple(first), max=tuple(high))
    # Releases that know nothing but strong typing may drop its flag.
    typed = hasattr(import_module(job.library).NetworkDefinitionCreationFlag, "STRONGLY_TYPED")
    network = backend.NetworkFromOnnxPath(
        job.model, strongly_typed=typed, mark_unfused_tensors_as_debug_tensors=job.layers
    )
    if job.library == "tensorrt_rtx":
        chosen = {"compute_capabilities": [tuple(job.capability)]} if job.capability else {"use_gpu": True}
        config = polygraphy("backend.tensorrt_rtx").CreateConfigRTX(profiles=[profile], **chosen)
    else:
        config = backend.CreateConfig(profiles=[profile])
    data = backend.EngineBytesFromNetwork(network, config=config)()
    Path(job.engine).write_bytes(bytes(data))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
