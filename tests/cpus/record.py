"""Writes models, inputs and their right answers, for `compare.py` to check on other CPUs.

Kernels: the exact answers, in integers. Networks: those of tests/cpus/nets.py and the repository's digit classifier,
quantized here; their answers are what this machine computes with optimizations off, which no CPU adds in 16 bits.
"""

import json
from pathlib import Path

import numpy as np
import onnx

import onnxq
from onnxq.config import Config
from tests.cpus.kernels import cases, multiply_exactly
from tests.cpus.nets import NETS, answers, net, quantized, samples

DIGITS = Path(__file__).resolve().parents[2] / "examples" / "digits"


def record(folder: Path) -> None:
    """Write `list.json`, and for each of its entries NAME.onnx, NAME.inputs.npz, NAME.answers.npz."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = []

    def write(
        name: str, kind: str, proto: onnx.ModelProto, feeds: dict[str, np.ndarray], right: list[np.ndarray]
    ) -> None:
        onnx.save(proto, folder / f"{name}.onnx")
        np.savez(folder / f"{name}.inputs.npz", **feeds)
        np.savez(folder / f"{name}.answers.npz", *right)
        entries.append({"name": name, "kind": kind})

    for name, make in cases().items():
        case = make()
        write(name, "kernel", case.model, {"x": case.x}, [case.answer(multiply_exactly)])
    for name, proto, feeds in _networks():
        write(name, "network", proto, feeds, list(answers(proto, feeds, optimize=False).values()))
    (folder / "list.json").write_text(json.dumps(entries), encoding="utf-8")


def _networks() -> list[tuple[str, onnx.ModelProto, dict[str, np.ndarray]]]:
    found = []
    for name in NETS:
        for effort in ("fast", "balanced"):
            fresh = samples(net(name), count=8, seed=7)
            found.append((f"{name}-{effort}", quantized(name, effort=effort).model, fresh))
    digits = onnxq.quantize(DIGITS / "digits.onnx", DIGITS / "digits.npz", Config(), overrides={"latency": False})
    return [*found, ("digits", digits.model, {"image": np.load(DIGITS / "digits_eval.npz")["image"][:64]})]
