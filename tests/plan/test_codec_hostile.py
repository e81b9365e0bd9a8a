"""Plan files that are damaged, hostile or oddly edited: a PlanError with line and path, or a plan; nothing else."""

import base64
import json
import random
import time
import zlib
from typing import Any

import pytest

import onnxq
from onnxq.errors import OnnxqError, PlanError
from onnxq.plan import Plan, from_json, to_json
from tests.pipeline.models import EVERYTHING, images, residual

BOMB = base64.b64encode(zlib.compress(bytes(50_000_000), 9)).decode()


@pytest.fixture(scope="module")
def plan() -> Plan:
    return onnxq.quantize(residual(), images(), EVERYTHING, overrides={"latency": False}).plan


@pytest.fixture(scope="module")
def text(plan: Plan) -> str:
    return to_json(plan)


VALUES = [
    10**30, 1e308, float("inf"), float("nan"), -1, 0, 1.5, True, None, "", "x", "x\0y", [], [1], [[1, 2], [3]], ["x"],
    {}, {"a": 1}, {"shape": [2**40], "zlib64": ""}, {"shape": [4], "zlib64": "!"}, {"shape": [4], "zlib64": BOMB},
    {"shape": [], "zlib64": []}, [["x", 2**70]], ["a/Conv", 99],
]  # fmt: skip


def test_odd_values_anywhere_end_in_words(text: str) -> None:
    for key in ("scale", "zero_point", "rule", "site", "scope", "bound", "consumers", "derived", "anchor", "values"):
        for value in VALUES:
            raw = json.loads(text)
            raw["sites"] = raw["sites"][:2]
            raw["sites"][1][key] = value
            fault = _fault(json.dumps(raw))
            assert fault is None or (fault.subject.startswith("p.json:") and "sites[1]" in fault.subject)


def _fault(content: str) -> PlanError | None:
    try:
        from_json(content, source="p.json")
    except PlanError as error:
        return error
    return None


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[" * 100_000, "recursion limit"),
        ('{"schema": 1, "sites": ' + "[" * 500 + "]" * 500 + "}", "recursion limit"),
        ('{"schema": ' + "9" * 5000 + "}", "number out of range"),
        ('{"schema": 1,\n "target": "\0"}', "p.json:2"),
        ('{"schema": 1,\n "target": "\\ud800"}', "p.json:2"),
        ('{"schema": 1, "target": "ort", "target": "trt"}', "gives 'target' twice"),
        ("", "p.json:1"),
        ("\0", "p.json:1"),
    ],
)
def test_what_is_no_json_is_told_with_its_line(content: str, said: str) -> None:
    with pytest.raises(PlanError) as caught:
        from_json(content, source="p.json")
    assert said in str(caught.value)


def test_a_fault_names_line_and_path(text: str) -> None:
    lines = text.splitlines()
    number = next(k for k, line in enumerate(lines) if '"bits"' in line)
    lines[number] = lines[number].replace("8", '"eight"')
    with pytest.raises(PlanError) as caught:
        from_json("\n".join(lines), source="p.json")
    assert caught.value.subject == f"p.json:{number + 1}: sites[0].spec.bits"


def test_a_packed_array_is_no_larger_than_its_shape(text: str) -> None:
    raw = json.loads(text)
    raw["sites"][1]["scale"] = {"shape": [4], "zlib64": BOMB}
    with pytest.raises(PlanError, match="must hold 16 bytes"):
        from_json(json.dumps(raw))


def _mutate(node: Any, rng: random.Random) -> Any:
    """The JSON value with one entry, anywhere in it, changed."""
    if isinstance(node, (dict, list)) and node and rng.random() < 0.9:
        key = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
        change = rng.random()
        if change < 0.15:
            del node[key]
        elif change < 0.25 and isinstance(node, dict):
            node[f"{key}x"] = node.pop(key)
        elif change < 0.35 and isinstance(node, list):
            node.append(json.loads(json.dumps(node[key])))
        else:
            node[key] = _mutate(node[key], rng)
        return node
    return rng.choice(VALUES)


def test_no_mutation_of_a_plan_is_a_defect(text: str) -> None:
    """Read, and of those that can be read a few carried out."""
    rng, outcomes, applied, model = random.Random(3), [], 0, residual()
    end = time.process_time() + 2
    for _ in range(600):
        raw = json.loads(text)
        for _ in range(rng.randint(1, 2)):
            raw["sites"] = _mutate(raw["sites"], rng) if rng.random() < 0.7 else raw["sites"]
            raw = _mutate(raw, rng) if rng.random() < 0.3 else raw
            if not isinstance(raw, dict) or not isinstance(raw.get("sites"), list):
                break
        try:
            plan = from_json(json.dumps(raw), source="p.json")
            if applied < 25:
                applied += 1
                onnxq.apply(model, plan)
            outcomes.append("carried out")
        except OnnxqError as error:
            outcomes.append(type(error).__name__)
        if time.process_time() > end:
            break
    assert {"carried out", "PlanError"} <= set(outcomes)
