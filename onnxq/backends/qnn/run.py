"""The emulator's answers, by a process of its own: the library may crash, and a large model may take minutes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from onnxq.backends.building import COMPILING, demand_build, serve_child
from onnxq.backends.engine import Engine, Job, Profile
from onnxq.backends.qnn.kernels import ANSWERS, FEEDS
from onnxq.errors import ModelError
from onnxq.graph import GraphIndex, ModelLike, get_index
from onnxq.graph.verify import QUANTIZE
from onnxq.runtime import Feeds, tap_tensors
from onnxq.sites import TensorId

# Seconds to emulate one sample, and to load a compiled model.
_RUNNING = 600.0


class EmulatorRunner:
    """A Runner of a compiled model. seconds: of its last run in the emulator, which no device takes."""

    def __init__(self, name: str, folder: Path, ask: Callable[[float], str], inputs: frozenset[str]) -> None:
        self.name, self.seconds = name, 0.0
        self._folder, self._ask, self._inputs = folder, ask, inputs

    def infer(self, feeds: Feeds) -> Mapping[str, Any]:
        """One sample: arrays by name. Raises ModelError where the emulator fails, or takes too long."""
        given: dict[str, Any] = {name: value for name, value in feeds.items() if name in self._inputs}
        np.savez(self._folder / FEEDS, **given)
        reply = json.loads(self._ask(_RUNNING))
        if "error" in reply:
            raise ModelError(self.name, f"the emulator cannot run the model: {reply['error']}", code="Q115")
        self.seconds = reply["seconds"]
        with np.load(self._folder / ANSWERS) as answers:
            return dict(answers)


@contextmanager
def emulate(
    engine: Engine, name: str, model: ModelLike, shapes: Profile, folder: Path, *, inner: bool
) -> Iterator[EmulatorRunner]:
    """Compile a model and open its emulator. inner: integers of quantized tensors are outputs, too.

    Raises ModelError, naming the node, where the model is not compiled, and for samples of several sizes.
    """
    for value, sizes in shapes.items():
        if len(set(sizes)) > 1:
            listed = ", ".join(dict.fromkeys("x".join(map(str, size)) for size in sizes))
            fix = "give samples of one size"
            raise ModelError(
                f"input {value}", f"a compiled model takes one size, and samples have {listed}", fix, code="Q115"
            )
    job = Job(shapes=shapes, options=dict(engine.options))
    tapped = _tap_quantized(model) if inner else model
    demand_build(engine, tapped, job, folder, subject=name, timeout=COMPILING)
    with serve_child(engine, folder, {"options": dict(engine.options)}, timeout=_RUNNING) as ask:
        yield EmulatorRunner(name, folder, ask, frozenset(value.name for value in GraphIndex(model).inputs))


def _tap_quantized(model: ModelLike) -> ModelLike:
    """The model with the integers of quantized activations as outputs: fusions need them anyway, and stay."""
    index = get_index(model)
    makers = (node for node in index.nodes if node.op_type == QUANTIZE and not node.scope)
    wanted = [node.result for node in makers if not index.is_constant(TensorId(node.inputs[0]))]
    return tap_tensors(model, wanted).proto
