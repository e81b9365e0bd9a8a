"""The fit of a table of costs: from samples of a machine with known costs it finds them again."""

import importlib
import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from onnxq.backends import find_target
from onnxq.backends.costs import OpCase
from onnxq.backends.cpu_costs import CpuCosts, parse_costs

CPU_COSTS = find_target("ort").costs

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
VNNI = CPU_COSTS["vnni"]


@pytest.fixture
def fitting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(FOLDER)
    yield importlib.import_module("op_cost_fit")
    sys.modules.pop("op_cost_fit", None)


def samples(cpu: CpuCosts) -> Iterator[dict[str, Any]]:
    """Gemms, MatMuls and pairs of many sizes, timed by the model itself."""
    for op, rows, depth, outputs in itertools.product(("Gemm", "MatMul"), (1, 16, 128), (64, 384, 1024), (64, 512)):
        case = {"op_type": op, "inputs": [[rows, depth]], "output": [rows, outputs], "weight": [depth, outputs]}
        fields = {key: tuple(map(tuple, v)) if key == "inputs" else v for key, v in case.items()}
        cost = cpu.predict_node(OpCase(**fields))
        times = {"float_us": cost.float_us, "int8_us": cost.int8_us}
        yield {"family": op.lower(), "shape": [rows, depth], "op": "", "cases": [case], **times}
    for elements, conv in itertools.product((64, 4096, 262144), (False, True)):
        cases = [{"boundary": side, "elements": elements, "conv": conv} for side in ("dequantize", "quantize")]
        pair = cpu.predict_quantize(elements, from_conv=conv) + cpu.predict_dequantize(elements, to_conv=conv)
        yield {"family": "boundary", "shape": [elements], "op": "", "cases": cases, "float_us": -1.0, "int8_us": pair}


def test_known_costs_are_found_again(fitting: Any, tmp_path: Path) -> None:
    linear = replace(VNNI.linear, gmacs=40.0, int8_gmacs=90.0, launch=0.6, int8_launch=1.4)
    machine = replace(VNNI, linear=linear, pairs=replace(VNNI.pairs, q_ns=0.2, dq_ns=0.3))
    path, out = tmp_path / "samples.jsonl", tmp_path / "slow.json"
    path.write_text("".join(json.dumps(row) + "\n" for row in samples(machine)))
    fitting.fit(path, "slow", "a made-up machine", VNNI, {"int8_network": 1.25, "conv.float_gmacs.4": 99.0}, out)
    found = parse_costs(out.read_text(encoding="utf-8"))
    for row in fitting.read(path):
        for side in ("float", "int8"):
            if row[f"{side}_us"] > 0:
                assert fitting.predicted(row, side, fitting.warm(found)) == pytest.approx(row[f"{side}_us"], rel=0.1)
    assert found.linear.int8_gmacs == pytest.approx(90, rel=0.1)
    assert found.int8_network == 1.25
    assert found.conv.float_gmacs == {1: 106.0, 2: 134.0, 4: 99.0}
    assert found.depthwise.int8_ns == VNNI.depthwise.int8_ns
    assert found.origin == "a made-up machine"
