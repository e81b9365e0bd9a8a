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
    modules={
        # In the order of the help, which is that of a newcomer's steps.
        "quantize": "onnxq.cli.quantize",
        "plan": "onnxq.cli.plan",
        "apply": "onnxq.cli.apply",
        "prove": "onnxq.cli.prove",
        "bench": "onnxq.cli.bench",
        "diff": "onnxq.cli.diff",
        "profile": "onnxq.cli.profile",
        "import-calibration": "onnxq.cli.import_calibration",
        "inspect": "onnxq.cli.inspect",
        "annotate-bits": "onnxq.cli.annotate_bits",
        "build-kernels": "onnxq.cli.build_kernels",
        "explain": "onnxq.cli.explain",
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
