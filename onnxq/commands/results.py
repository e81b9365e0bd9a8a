"""The results of all commands, shown each in its form."""

import io
from importlib import import_module
from typing import Any

from onnxq.errors import ConfigError, OnnxqError
from onnxq.pipeline.finalize import Result
from onnxq.report.document import ErrorValues, ResultFormat
from onnxq.report.terminal import TextView, render_parts

# Class of a result -> the module of its command, which is imported when such a result is shown.
_MODULES = {
    "AppliedImport": "import_calibration",
    "Bench": "bench",
    "Comparison": "compare",
    "Conversion": "convert",
    "Difference": "diff",
    "ExportedScales": "export_calibration",
    "Imported": "import_calibration",
    "ImportedWeights": "import_weights",
    "Inspection": "inspect",
    "Kernels": "kernels",
    "Part": "shards",
    "Perplexity": "perplexity",
    "Plan": "plan",
    "Profile": "profile",
    "Proof": "prove",
    "ReportRecord": "report",
    "Report": "quantize",
    "SearchResult": "search",
    "Variants": "variants.result",
}
# Results of functions that are not public.
_INTERNAL = ("AppliedImport", "Kernels")


def find_form(result: object) -> ResultFormat[Any]:
    """The form of a result. Raises ConfigError for anything that no command returns."""
    kind = type(result).__name__
    if kind not in _MODULES:
        names = ", ".join(sorted({*_MODULES, "Result"}.difference(_INTERNAL)))
        raise ConfigError("result", f"{kind} has no summary", f"give one of: {names}", code="Q304")
    # By name and late: the modules of all commands together load every engine.
    form: ResultFormat[Any] = import_module(f"onnxq.commands.{_MODULES[kind]}").FORM
    return form


def find_shown(result: object) -> object:
    """The part of a result that is shown: of a Result its report."""
    return result.report if isinstance(result, Result) else result


def show(result: object, view: TextView = TextView(), *, error: ErrorValues = None) -> None:
    """Print a result. error: the one that the command ends with in spite of it, as plain values for the JSON."""
    shown = find_shown(result)
    find_form(shown).show(shown, view, error)
    applied = getattr(result, "applied", None)
    # The JSON of an import holds the report of the plan that was carried out at once; the text comes behind it.
    if applied is not None and not view.as_json:
        show(applied, view)


def find_fault(result: object) -> tuple[OnnxqError | None, int]:
    """The error that a command ends with in spite of its result, None for none; and its exit code."""
    shown = find_shown(result)
    form = find_form(shown)
    return (None if form.find_fault is None else form.find_fault(shown)), form.exit_code


def write_json(result: object, error: ErrorValues = None) -> str:
    """The JSON document of a result. error: as for `show`."""
    shown = find_shown(result)
    return find_form(shown).write_json(shown, error)


def summarize(result: object, *, verbose: bool = False, width: int | None = None) -> str:
    """The summary of a result as text: what the command of the same name prints.

    result: what `quantize`, `apply`, `make_plan`, `diff`, `prove`, `bench`, `profile_model`, `variants`, `perplexity`,
    `inspect`, `import_calibration` or `merge_parts` returned. verbose: all of it. width: in columns; None: breaks no
    line. Raises ConfigError for anything else.
    """
    text = io.StringIO()
    # Warnings stand in it too, where a command writes them.
    show(result, TextView(verbose=verbose, width=width, stream=text))
    return text.getvalue()


def render_html(result: object) -> str:
    """The summary of a result as HTML with its styles, as notebooks show it. result: as for `summarize`."""
    shown = find_shown(result)
    form = find_form(shown)
    return render_parts([*form.make_parts(shown, TextView()), *form.format_warnings(shown)])
