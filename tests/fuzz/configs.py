"""Configurations: YAML of ours and of Sparsebit's, its text damaged or its values replaced."""

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Any

import onnx
import yaml

import onnxq
from tests.fuzz.judge import check_result
from tests.fuzz.mutate import mutate_text, mutate_tree
from tests.fuzz.nets import feeds, net

_PRESETS = sorted((Path(__file__).resolve().parents[2] / "configs").glob("*.yaml"))
_NETS = ("conv", "attention", "branches", "shapes")
_OURS: dict[str, Any] = {
    "extends": "ort-int8",
    "target": "ort",
    "mode": "static",
    "activations": {
        "bits": 8, "scheme": "asymmetric", "signed": False, "granularity": "tensor",
        "observer": {"name": "percentile", "percentile": 99.9},
    },
    "weights": {"bits": 8, "scheme": "symmetric", "signed": True, "granularity": "channel", "observer": "mse"},
    "bias": "int32",
    "saturation": "avoid",
    "effort": "fast",
    "attention": "float",
    "placement": "rules",
    "cpu": "any",
    "skip": ["augmented_samples", "rounding"],
    "rules": [
        {"node": "node_1", "set": {"float": True}},
        {"op": ["Conv", "Gemm"], "role": "weight", "set": {"observer": "mse", "bits": 8}},
        {"op": "*", "set": {"quantize": True}},
    ],
    "data": {"samples": 4, "seed": 0, "batch": 1},
    "verify": {"holdout": 1, "latency": False, "threads": 1},
    "torch": {"skip_trace": ["/^a$/"], "fuse_bn": True},
}  # fmt: skip
_FEW_BITS: dict[str, Any] = {
    "extends": "ort-int4-weights",
    "weights": {"bits": 4, "granularity": "block", "block_size": 16, "storage": "uint4"},
    "weight_bits": [4, 8],
    "effort": "fast",
    "verify": {"latency": False},
}
_SPARSEBIT: dict[str, Any] = {
    "BACKEND": "onnxruntime",
    "SKIP_TRACE_MODULES": ["a_*"],
    "SCHEDULE": {"FUSE_BN": True, "BN_TUNING": False, "DISABLE_UNNECESSARY_QUANT": True},
    "W": {
        "QSCHEME": "per-channel-symmetric", "QUANTIZER": {"TYPE": "uniform", "BIT": 8},
        "OBSERVER": {"TYPE": "MSE"}, "SPECIFIC": [{"node_1": ["QUANTIZER.BIT", 8]}],
    },
    "A": {
        "QSCHEME": "per-tensor-affine", "QUANTIZER": {"TYPE": "uniform", "BIT": 8},
        "OBSERVER": {"TYPE": "PERCENTILE", "PERCENTILE": {"ALPHA": 0.001}}, "QADD": {"ENABLE_QUANT": False},
    },
}  # fmt: skip
_TRICKS = (
    "&a [*a]", "*nothing", "!!python/object/apply:os.system [true]", "!!binary aGVsbG8=", "2026-01-01", "!!set {a, b}",
    "!!omap [a: 1]", "{? [a, b] : 1}", "1:30:00", "0o17", "0x1F", "!!float abc", "!!int x", "!!timestamp x", ".inf",
    ".nan", "~", "yes", "{<<: 1}", "{<<: {bits: 4}}", "!!bool maybe", "{a: 1, a: 2}", "!unknown x",
    "|\n  text\n", "!!null x", "9" * 5000, "[" * 2000, "&b {c: *b}",
)  # fmt: skip


def make_case(rng: Random, folder: Path) -> str:
    """Write a network, a damaged configuration, and case.json that says what is to be done with them."""
    name = rng.choice(_NETS)
    source = rng.choice(("preset", "ours", "ours", "ours", "few", "sparsebit"))
    tree = {"ours": _OURS, "few": _FEW_BITS, "sparsebit": _SPARSEBIT}.get(source)
    if tree is None:
        text = rng.choice(_PRESETS).read_text(encoding="utf-8")
    else:
        keys = [key for key in tree if rng.random() < 0.6] or list(tree)
        text = yaml.safe_dump({key: tree[key] for key in keys}, sort_keys=False)
    kind = rng.choice(("text", "tree", "tree", "trick"))
    if kind == "tree":
        damaged = mutate_tree(rng, yaml.safe_load(text))
        with contextlib.suppress(RecursionError):  # of PyYAML's writer; deep nesting is among the tricks too
            text = yaml.safe_dump(damaged, sort_keys=False, allow_unicode=rng.random() < 0.5)
    elif kind == "text":
        text = mutate_text(rng, text)
    else:
        lines = text.splitlines()
        at = rng.randrange(len(lines))
        lines[at] = f"{lines[at].partition(':')[0]}: {rng.choice(_TRICKS)}"
        text = "\n".join(lines)
    (folder / "model.onnx").write_bytes(net(name).SerializeToString())
    (folder / "config.yaml").write_text(text, encoding="utf-8", errors="surrogatepass")
    verb = rng.choice(("load", "quantize", "plan"))
    (folder / "case.json").write_text(json.dumps({"verb": verb}))
    return f"{name}, {source}, {kind}, {verb}"


def run_case(folder: Path, work: Path) -> Iterable[str]:
    """Load the configuration, and quantize or plan by it."""
    path, config, out = folder / "model.onnx", folder / "config.yaml", work / "out.onnx"
    verb = json.loads((folder / "case.json").read_text())["verb"]
    loaded = onnxq.load_config(config)
    if verb == "load":
        return []
    samples = feeds(onnx.load(path))
    if verb == "plan":
        onnxq.make_plan(path, samples, config, out=work / "plan.json")
        return ["plan.json"]
    result = onnxq.quantize(path, samples, config, overrides={"latency": False}, out=out)
    # Few bits are asked for and given: how far the answers may go is for the one who asks.
    judged = loaded.weights.bits == 8 and loaded.activations.bits == 8
    check_result(result, out, path, samples if judged else (), target=loaded.target)
    return ["out.onnx"]
