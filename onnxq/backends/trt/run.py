"""TensorRT's engines built for the GPU of this machine, and run with Polygraphy."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from onnxq.arrays import RunValues
from onnxq.backends.building import COMPILING, demand_build
from onnxq.backends.engine import Engine, Job
from onnxq.backends.trt.build import load_plugins, make_logger
from onnxq.errors import MissingDependencyError, ModelError
from onnxq.graph import ModelLike
from onnxq.runtime import Feeds

POLYGRAPHY = "pip install 'onnxq[polygraphy]'"
# Of its errors: the name of its runs.
_SUBJECT = "trt"
# Characters of a message of Polygraphy's: it goes on for lines, and only the first ones name the cause.
_MESSAGE = 500


def build_trt(engine: Engine, proto: ModelLike, job: Job, folder: Path) -> Path:
    """Build an engine for this machine's GPU, or another's capability, in a child process. Returns its path.

    Raises ModelError with TensorRT's own words when it gives none, ConfigError for a plugin that it cannot load.
    """
    # Without TF32: differences of kernels are looked for, not of float formats.
    return demand_build(
        engine, proto, replace(job, tf32=False), folder, subject=_SUBJECT, timeout=COMPILING
    )


def load_polygraphy(module: str) -> Any:
    """A module of Polygraphy. Raises MissingDependencyError with the install line."""
    try:
        return import_module(f"polygraphy.{module}")
    except ImportError as error:
        raise MissingDependencyError(
            "polygraphy", f"cannot be imported ({error})", POLYGRAPHY, code="Q804"
        ) from error


@contextmanager
def translate_errors() -> Iterator[None]:
    """Nothing that Polygraphy logs is shown; its errors become ModelErrors with its words."""
    logger = load_polygraphy("logger").G_LOGGER
    own = load_polygraphy("exception").PolygraphyException
    with logger.verbosity(logger.CRITICAL + 1):
        try:
            yield
        except (own, OSError) as error:  # OSError: a CUDA library that cannot be loaded
            message = " ".join(str(error).split())
            raise ModelError("Polygraphy", message[:_MESSAGE] or "failed", code="Q115") from error
        except (AttributeError, TypeError, RuntimeError) as error:
            # Polygraphy and TensorRT grow apart with their releases; a mismatch shows as one of these.
            fix = "install releases of polygraphy and TensorRT that belong together"
            raise ModelError(
                _SUBJECT, f"{type(error).__name__}: {error}", fix, code="Q115"
            ) from error


class TrtRunner:
    """A Runner of a built engine: a context manager. Tensors that survived fusion come out with its outputs."""

    def __init__(self, engine: Engine, name: str, path: Path, plugins: Sequence[str] = ()) -> None:
        self.name = name
        self.seconds = 0.0
        # In this process, where the engine runs: NVIDIA's plugins, of which TensorRT for RTX has none, and these. Those
        # that are there already stay.
        if engine.installed and (plugins or not engine.builds_ahead):
            library = import_module(engine.module)
            with open(os.devnull, "w", encoding="utf-8") as sink:
                load_plugins(library, make_logger(library, sink), plugins)
        # Polygraphy decides once which TensorRT it uses, when its TensorRT backend is first imported.
        load_polygraphy("config").USE_TENSORRT_RTX = engine.builds_ahead
        with translate_errors():
            backend = load_polygraphy("backend.trt")
            self._runner = backend.TrtRunner(backend.EngineFromPath(str(path)), name=name)
        self._open = ExitStack()

    def __enter__(self) -> TrtRunner:
        with translate_errors():
            self._open.enter_context(self._runner)
        return self

    def __exit__(self, *exception: object) -> None:
        with translate_errors():
            self._open.close()

    def infer(self, feeds: Feeds) -> RunValues:
        """One sample: arrays by name. They may be the runner's own buffers, which last until its next run."""
        with translate_errors():
            # Dataset checks the feeds, with better messages.
            values = dict(self._runner.infer(dict(feeds), check_inputs=False))
            self.seconds = self._runner.last_inference_time()
            return values
