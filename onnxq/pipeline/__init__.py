"""The run: prepare, split, equalize, plan, calibrate, refine, emit, check. Commands stand above it."""

from onnxq.graph import ModelSource, name_file
from onnxq.pipeline.both_models import load_both
from onnxq.pipeline.configuration import Configuration, OutputPath, Overrides, open_run
from onnxq.pipeline.finalize import Result, write_result

__all__ = [
    "Configuration",
    "ModelSource",
    "OutputPath",
    "Overrides",
    "Result",
    "load_both",
    "name_file",
    "open_run",
    "write_result",
]
