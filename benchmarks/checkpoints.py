"""Checkpoints of other tools put into two exports of their network: are codes and answers theirs?

    python benchmarks/checkpoints.py --python TOOLS/bin/python --out out/checkpoints

TOOLS is an environment of its own: `pip install auto-round gguf gptqmodel llmcompressor transformers onnxscript`. A
small Llama is trained and quantized there (`checkpoint_tools.py`). "Weights" counts those that stand in the file with
the checkpoint's codes: as float32 they are what the tool dequantizes them to, to the last bit. Perplexity is that of
the tool's own model and of the imported file in ONNX Runtime, on the same tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import onnxq
from measure import table
from onnxq.runtime import Session

KINDS = (
    "gptqmodel:gptq",
    "gptqmodel:gptq desc_act",
    "gptqmodel:gptq_v2",
    "auto-round:auto_awq",
    "llmcompressor:W4A16",
    "llmcompressor:GPTQ",
    "llmcompressor:W8A8",
    "llmcompressor:W8A8 static",
    "gguf:Q4_0",
    "gguf:Q4_1",
    "gguf:Q8_0",
)
EXPORTS = {"dynamo.onnx": "torch.onnx, dynamo", "script.onnx": "TorchScript, names as in optimum"}
HEADER = [
    "tool",
    "export",
    "weights",
    "perplexity of the tool",
    "of the file",
    "largest difference of a logit",
    "MB",
]


def compute_perplexity(logits: np.ndarray, tokens: np.ndarray) -> float:
    """Of each token behind the ones in front of it."""
    wide = logits[:, :-1].astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    likelihood = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
    return float(np.exp(-np.take_along_axis(likelihood, tokens[:, 1:, None], -1).mean()))


def make_rows(python: str, kind: str, folder: Path) -> Iterator[list[str]]:
    """A row for each export of one checkpoint."""
    command = [python, str(Path(__file__).with_name("checkpoint_tools.py")), kind, str(folder)]
    environment = {**os.environ, "GPTQMODEL_CPU_WORKERS": "2"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        yield [kind, "", done.stderr.strip().splitlines()[-1][:80], *[""] * 4]
        return
    title = f"{kind} {json.loads(done.stdout.splitlines()[-1])['version']}"
    with np.load(folder / "answers.npz") as answers:
        tokens, expected = answers["ids"], answers["logits"]
    checkpoint = next(
        path for path in (folder / "checkpoint", folder / "checkpoint.gguf") if path.exists()
    )
    # auto-round makes a folder inside.
    checkpoint = next((path.parent for path in checkpoint.rglob("*.safetensors")), checkpoint)
    for name, export in EXPORTS.items():
        try:
            yield [title, export, *describe_import(folder / name, checkpoint, tokens, expected)]
        except onnxq.OnnxqError as error:
            yield [title, export, str(error)[:80], *[""] * 4]


def describe_import(
    source: Path, checkpoint: Path, tokens: np.ndarray, expected: np.ndarray
) -> list[str]:
    """Cells of one import."""
    settings: dict[str, Any] = {"latency": False}
    imported = onnxq.import_weights(str(source), str(checkpoint), overrides=settings)
    target = source.with_suffix(".q.onnx")
    imported.result.save(target, force=True)
    got = next(iter(Session(target).run({"ids": tokens}).values()))
    return [
        f"{len(imported.placed)} of {len(imported.placed) + len(imported.skipped)}",
        f"{compute_perplexity(expected, tokens):.4f}",
        f"{compute_perplexity(got, tokens):.4f}",
        f"{np.abs(got - expected).max():.1e} of {np.abs(expected).max():.0f}",
        f"{target.stat().st_size / 1e6:.1f}",
    ]


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kinds", nargs="*", default=KINDS)
    parser.add_argument("--python", required=True, help="of the environment of the tools")
    parser.add_argument("--out", type=Path, default=Path("out/checkpoints"))
    arguments = parser.parse_args()
    rows = []
    for kind in arguments.kinds:
        for row in make_rows(
            arguments.python, kind, arguments.out / kind.replace(":", "-").replace(" ", "-")
        ):
            print(" | ".join(row), flush=True)
            rows.append(row)
    print(table(rows, HEADER))


if __name__ == "__main__":
    main()
