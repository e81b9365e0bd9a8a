"""Plans as JSON: text damaged, or sites, numbers and names replaced by what no plan holds."""

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import onnx

import onnxq
from onnxq.plan import from_json, to_json
from tests.fuzz.judge import check_file, check_plan, check_result
from tests.fuzz.mutate import mutate_text, mutate_tree
from tests.fuzz.nets import feeds, net


@cache
def _plan(name: str, numbers: bool) -> str:
    proto = net(name)
    if not numbers:
        return to_json(onnxq.make_plan(proto, feeds(proto), onnxq.Config(effort="fast")))
    effort = "balanced" if name == "conv" else "fast"
    return onnxq.quantize(proto, feeds(proto), overrides={"effort": effort, "latency": False, "threads": 1}).plan_json()


def make_case(rng: Random, folder: Path) -> str:
    """Write a network, a damaged plan for it, and case.json that says what is to be done with them."""
    name, numbers = rng.choice(("conv", "attention", "branches", "shapes")), rng.random() < 0.7
    text = _plan(name, numbers)
    kind = rng.randrange(4)
    if kind == 0:
        text = mutate_text(rng, json.dumps(json.loads(text), indent=1))
    else:
        tree = json.loads(text)
        # The greater part of a plan is its sites: damage them, or the plan around them.
        if kind == 1 and tree.get("sites"):
            at = rng.randrange(len(tree["sites"]))
            tree["sites"][at] = mutate_tree(rng, tree["sites"][at])
        elif kind == 2:
            key = rng.choice(list(tree))
            changed = mutate_tree(rng, {key: tree[key]})
            tree = tree | changed if isinstance(changed, dict) else changed
        else:
            tree = mutate_tree(rng, tree)
        text = json.dumps(tree, indent=1)
    case: dict[str, Any] = {
        "verb": rng.choice(("apply", "apply", "apply", "annotate", "read")),
        "data": rng.random() < 0.6,
        "new_weights": rng.random() < 0.1,
    }
    (folder / "model.onnx").write_bytes(net(name).SerializeToString())
    (folder / "plan.json").write_text(text, encoding="utf-8", errors="surrogatepass")
    (folder / "case.json").write_text(json.dumps(case))
    return f"{name}, {'with' if numbers else 'without'} numbers, kind {kind}, {case}"


def run_case(folder: Path, work: Path) -> Iterable[str]:
    """Apply the plan, read it, or annotate a model by it."""
    path, plan, out = folder / "model.onnx", folder / "plan.json", work / "out.onnx"
    case = json.loads((folder / "case.json").read_text())
    if case["verb"] == "read":
        check_plan(from_json(plan.read_text(encoding="utf-8", errors="replace"), source="plan.json"))
        return []
    if case["verb"] == "annotate":
        onnxq.annotate_bits(path, plan=plan, out=out)
        check_file(out)
        return ["out.onnx"]
    samples = feeds(onnx.load(path))
    result = onnxq.apply(
        path,
        plan,
        samples if case["data"] else None,
        overrides={"new_weights": case["new_weights"], "latency": False, "threads": 1, "plan_out": work / "plan.json"},
        out=out,
    )
    # Without samples nobody has looked at the answers; a plan may ask for any scale.
    check_result(result, out, path, samples if case["data"] else (), target=result.plan.target)
    return ["out.onnx", "plan.json"]
