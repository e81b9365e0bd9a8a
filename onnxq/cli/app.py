"""The `onnxq` command. A subcommand's module is imported when the subcommand is named, the engine when it runs."""

from __future__ import annotations

import click

from onnxq.cli.group import LazyGroup

# The codes are those of `group`.
_EPILOG = """\b
Exit codes:
  0    done
  1    something in the model, data or configuration must be mended, or a tolerance is not met
       (the message says what and how; `onnxq explain CODE` says more)
  2    the command line is wrong
  3    done, but with refusals, and --strict was given
  4    done, but --min-sqnr or --max-drop does not hold
  70   a defect of onnxq
  130  stopped with Ctrl-C; nothing half-written is left (129: by SIGHUP, 143: by SIGTERM)
"""


@click.group(
    cls=LazyGroup,
    titles={
        # In the order of a newcomer's steps.
        "quantize": "Quantize a model, check the result, report each step.",
        "variants": "Make the float16, int8 and 4-bit files of a model for a hub.",
        "plan": "Show the tensors that would be quantized, how and why; a dry run.",
        "apply": "Carry out a plan on its model or on a re-export of it.",
        "prove": "Build the engine and tell which kernels run in int8.",
        "bench": "Time models side by side on an engine, and count their kernels.",
        "perplexity": "Compare language models on a text: perplexity, agreement, tokens a second.",
        "diff": "Compare a quantized model with its float one, and engines with each other.",
        "profile": "Measure the cost of each quantized site at the outputs.",
        "calibrate": "Observe one shard of the samples, in a batch system.",
        "merge": "Join the shards' ranges, for `quantize --ranges`.",
        "import-calibration": "Turn a TensorRT calibration cache into a plan with its scales.",
        "inspect": "List the Q/DQ pairs of any model, with their bits.",
        "annotate-bits": "Write the bits of every Q/DQ pair into the model.",
        "build-kernels": "Compile the kernels of the torch front end ahead of time.",
        "explain": "Explain a code such as Q303, and its fix.",
    },
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=_EPILOG,
)
@click.version_option(package_name="onnxq", prog_name="onnxq")
def cli() -> None:
    """Quantize ONNX models after training: smaller, faster, and checked.

    \b
    Start with:
      onnxq quantize model.onnx --data samples.npz
    """


def main() -> None:
    """Entry point of the `onnxq` script; ends the process with one of the documented exit codes."""
    cli.main(prog_name="onnxq")
