"""python -m onnxq.compat.preprocess --input MODEL --output OUT: quant_pre_process on the command line."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Sequence
from typing import Any

from onnxq.compat.shape_inference import quant_pre_process


def main(arguments: Sequence[str] | None = None) -> None:
    """Run quant_pre_process with the options of a command line."""
    parser = argparse.ArgumentParser(prog="python -m onnxq.compat.preprocess", description=__doc__)
    parser.add_argument("--input", required=True, dest="input_model")
    parser.add_argument("--output", required=True, dest="output_model_path")
    for name, one in inspect.signature(quant_pre_process).parameters.items():
        if name in ("input_model", "output_model_path") or one.kind is one.VAR_KEYWORD:
            continue
        # A flag, or a flag with a word, as `--skip_optimization True`.
        kind = str if one.default is None else type(one.default)
        options: dict[str, Any] = {"nargs": "?", "const": True} if kind is bool else {}
        parser.add_argument(f"--{name}", type=kind, default=one.default, **options)
    quant_pre_process(**vars(parser.parse_args(arguments)))


if __name__ == "__main__":
    main()
