"""quant_pre_process on the command line: `python -m onnxq.compat.preprocess`, with the options it has there."""

import argparse
import inspect
from collections.abc import Sequence
from typing import Any

from onnxq.compat.shape_inference import quant_pre_process

_FILES = {"input_model": "input", "output_model_path": "output"}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run quant_pre_process with the options of a command line."""
    parser = argparse.ArgumentParser(prog="python -m onnxq.compat.preprocess", description=__doc__)
    for name, parameter in inspect.signature(quant_pre_process).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            continue
        if name in _FILES:
            parser.add_argument(f"--{_FILES[name]}", required=True, dest=name)
            continue
        # A flag, or a flag with a word, as `--skip_optimization True`.
        kind = str if parameter.default is None else type(parameter.default)
        options: dict[str, Any] = {"nargs": "?", "const": True} if kind is bool else {}
        parser.add_argument(f"--{name}", type=kind, default=parameter.default, **options)
    quant_pre_process(**vars(parser.parse_args(arguments)))


if __name__ == "__main__":
    main()
