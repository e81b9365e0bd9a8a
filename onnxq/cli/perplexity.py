"""`onnxq perplexity`: language models side by side on a text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from onnxq.cli import options
from onnxq.cli.group import ModelCommand
from onnxq.config import Command

if TYPE_CHECKING:
    from onnxq.report import View


@click.command("perplexity", cls=ModelCommand, takes=Command.PERPLEXITY)
@click.argument("models", metavar="MODEL...", nargs=-1, required=True)
@click.option("--data", metavar="TEXT", required=True, help="A text file, in UTF-8.")
@options.as_json
@options.quiet
def run_command(models: tuple[str, ...], view: View, **given: Any) -> None:
    """Run language models on a text, and compare all with the first: perplexity, bits a byte, the share of positions
    with the same likeliest token, the divergence of their distributions, and texts generated greedily.

    The models are decoders of one vocabulary, with caches of keys and values or without. Tokens a second are those of a
    prompt and of generation behind half a window, timed side by side. The text is read in windows, one behind the
    other; of a long text --samples takes so many, spread over it.

    \b
    Examples:
      onnxq perplexity model.onnx model.q.onnx --data text.txt --tokenizer folder
      onnxq perplexity *.onnx --data text.txt --tokenizer bytes --samples 200 --generate 0 --json
    """
    from onnxq import report

    with report.show_progress(f"running {len(models)} models", *models, quiet=view.quiet) as progress:
        from onnxq import pipeline
        from onnxq.report.perplexities import show_perplexity

        found = pipeline.perplexity(models, progress=progress, **given)
    show_perplexity(found, view)
