"""Codes and the functions that provoke them."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import onnxq
from onnxq.backends import load_config
from onnxq.graph import ValueInfo
from tests.cli.kit import run
from tests.networks import parse_text

Provoke = Callable[[Path], Any]
REACHED: list[Any] = []
X = ValueInfo("x", onnx.TensorProto.FLOAT, ("N", 4))
F = np.float32
FORCE = {"op": "*", "set": {"quantize": True}}
EVERYTHING = load_config(None, {"effort": "fast", "rules": [FORCE]})


def reach(code: str, *marks: pytest.MarkDecorator) -> Callable[[Provoke], Provoke]:
    """The function raises an error with this code, or gives refusals or warnings of which one has it."""

    def put(provoke: Provoke) -> Provoke:
        REACHED.append(pytest.param(code, provoke, id=code, marks=marks))
        return provoke

    return put


def show(*args: object) -> dict[str, Any]:
    """The JSON that a command prints."""
    shown = run(*args, "--json")
    result: dict[str, Any] = json.loads(shown.stdout)
    if shown.exit_code:
        assert f"error[{result['error']['code']}]" in shown.stderr
    return result


def fail(*args: object) -> str:
    """The code of the error that a command shows beside its result."""
    return str(show(*args)["error"]["code"])


def codes_in(found: Any) -> Iterator[str]:
    """A code, that of an error, refusal or warning, or those of all in a collection."""
    if hasattr(found, "code"):
        yield found.code
    elif isinstance(found, str):
        yield found
    elif isinstance(found, (list, tuple)):
        for one in found:
            yield from codes_in(one)


def model(body: str, opset: int = 17, ir: int = 8, **tensors: Any) -> onnx.ModelProto:
    """A model from ONNX's text form; every node is named after its first output."""
    proto = parse_text(body, opset=opset, ir=ir, **tensors)
    for node in proto.graph.node:
        node.name = node.name or node.output[0]
    return proto


def gemm(rows: int = 4, columns: int = 3, **more: Any) -> onnx.ModelProto:
    """y = x @ w + b with weights of one seed."""
    weight = np.random.default_rng(0).standard_normal((rows, columns)).astype(F)
    body = f"g (float[N,{rows}] x) => (float[N,{columns}] y) {{ y = Gemm(x, w, b) }}"
    return model(body, **{"w": weight, "b": np.zeros(columns, F), **more})


def rows(count: int = 8, width: int = 4) -> dict[str, np.ndarray]:
    """Samples for `x`."""
    return {"x": np.random.default_rng(1).standard_normal((count, width)).astype(F)}


def quantized(proto: onnx.ModelProto | None = None, **how: Any) -> onnxq.Result:
    """The model of one product quantized on samples, every operator."""
    given = {"config": EVERYTHING, "overrides": {"latency": False}, **how}
    return onnxq.quantize(gemm(64, 64) if proto is None else proto, rows(8, 64), **given)


def saved(folder: Path, proto: onnx.ModelProto, name: str = "m.onnx") -> Path:
    """The model as a file."""
    onnx.save(proto, folder / name)
    return folder / name


def written(folder: Path, text: str | bytes, name: str) -> Path:
    """The text as a file."""
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8"))
    return path
