"""Writing to the terminal: text that fits, numbers for people. No other module prints."""

import io
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import PurePath
from typing import IO, TypeVar

from rich.console import Console

# Results are made of these; nobody else imports rich.
from rich.console import Group as Group
from rich.console import RenderableType as RenderableType
from rich.table import Table

from onnxq.errors import escape_line, escape_lines
from onnxq.evaluation.agreement import ChoiceAgreement
from onnxq.report.columns import Rows, Text
from onnxq.sites import Caution, Lines
from onnxq.wording import translate_text

T = TypeVar("T")
# A renderable, or the lines of a text.
# The parts of a result, from top to bottom.
Parts = Iterator[RenderableType]
Content = RenderableType | list[str] | Lines | Iterator[str]
# Labels and contents of a sheet.
SheetRows = Iterator[tuple[str, Content | None]]
# Columns; in a pipe nothing is cut or wrapped.
_PIPED_WIDTH = 100_000
# Columns of a table in a notebook, which scrolls what is wider.
_NOTEBOOK = 130
_PREFORMATTED = '<pre style="white-space:pre;overflow-x:auto;line-height:1.35">{code}</pre>'
# In a notebook rich would display by itself all that is to become a text.
_Console = partial(Console, highlight=False, emoji=False, markup=False, force_jupyter=False)
# Lines on choices.
_CHOICES = 3
MORE = "`verbose=True` lists them all"


@dataclass(frozen=True, kw_only=True)
class TextView:
    """The form in which a result is shown.

    as_json: as one JSON document. verbose: all of it. top: rows of each list, None for the usual number. quiet: only
    the warnings. stream, errors: in the place of stdout and stderr. width: see `print_renderable`.
    """

    as_json: bool = False
    verbose: bool = False
    top: int | None = None
    quiet: bool = False
    stream: IO[str] | None = None
    errors: IO[str] | None = None
    width: int | None = None


def print_result(
    view: TextView,
    document: Callable[[], str],
    parts: Iterable[RenderableType],
    warnings: Iterable[RenderableType],
) -> None:
    """Print a result: its parts, and behind them, where they stay on the screen, its warnings.

    In the place of the parts a view may ask for the document, JSON, or for nothing; the warnings then go to stderr.
    """
    loud = tuple(warnings)
    if view.as_json:
        write_stream(document(), view.stream)
    if not view.as_json and not view.quiet:
        print_renderable(Group(*parts, *loud), view.stream, view.width)
    elif loud:
        print_renderable(
            Group(*loud), sys.stderr if view.errors is None else view.errors, view.width
        )


def print_renderable(renderable: RenderableType, stream: IO[str] | None, width: int | None) -> None:
    """Print to `stream` (stdout): coloured and wrapped on a terminal; plain and uncut in a pipe, one line per row.

    width: wrap at so many columns in any case.
    """
    # FORCE_COLOR is about the standard output, not about a text that a program asks for.
    forced = None if stream is None else stream.isatty()
    console = _Console(file=stream, force_terminal=forced, width=width)
    # In a group, because rich copies a text that is printed alone, and the copy breaks words.
    group = Group(renderable)
    if console.is_terminal:
        console.print(group)
        return
    # Rendered in memory, because `write_stream` replaces letters that the stream cannot encode.
    console.width = width or _PIPED_WIDTH
    with console.capture() as capture:
        console.print(group)
    write_stream("".join(f"{line.rstrip()}\n" for line in capture.get().splitlines()), stream)


def render_parts(parts: Iterable[RenderableType]) -> str:
    """Parts of a result as HTML, with their styles."""
    console = _Console(file=io.StringIO(), record=True, width=_NOTEBOOK)
    console.print(Group(*parts))
    return console.export_html(inline_styles=True, code_format=_PREFORMATTED)


def write_stream(text: str, stream: IO[str] | None) -> None:
    """Write lines, escaped; letters that the stream cannot encode become "?"."""
    stream = sys.stdout if stream is None else stream
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(escape_lines(text).encode(encoding, "replace").decode(encoding))
    stream.flush()


def make_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    right: Iterable[str] = (),
    names: Iterable[str] = (),
    fold: Iterable[str] = (),
) -> Rows:
    """Make a table without borders. Each cell is one line, in which names are escaped.

    right: columns of numbers. names: columns that lose their middle if space is short. fold: columns of text, which
    breaks between words.
    """
    return Rows(
        tuple(columns),
        [[escape_line(str(cell)) for cell in row] for row in rows],
        frozenset(right),
        frozenset(names),
        frozenset(fold),
    )


def make_list(
    items: Sequence[T],
    view: TextView,
    columns: Sequence[str],
    cells: str | Callable[[T], Sequence[object]],
    *,
    usual: int | None = None,
    **kinds: Iterable[str],
) -> list[RenderableType]:
    """Make a table of the items that a view shows, and a line that counts the others.

    cells: the attributes of an item, by their names in one text, or a function that gives them. usual: as for
    `select_rows`. kinds: of columns, as for `make_table`.
    """
    shown, more = select_rows(items, view, usual)
    make_row = attrgetter(*cells.split()) if isinstance(cells, str) else cells
    return [make_table(columns, map(make_row, shown), **kinds), *list_more(more)]


def select_rows(
    rows: Sequence[T], view: TextView, usual: int | None = None
) -> tuple[Sequence[T], str]:
    """Select the rows to show; return them and a line that counts the others, "" for none.

    usual: their number where the view asks neither for one nor for all; None for all.
    """
    most = view.top if view.top is not None else None if view.verbose else usual
    if most is None or len(rows) <= most:
        return rows, ""
    hint = "a larger `top=…` shows them" if view.top is not None else MORE
    return rows[:most], f"and {len(rows) - most} more; {translate_text(hint)}"


def list_more(more: str) -> list[Text]:
    """The line of `select_rows` that counts the rows left out; [] for none."""
    return [Text(more, style="dim")] if more else []


def join_lines(lines: Sequence[str], verbose: bool, usual: int, between: str = "\n") -> Text:
    """Join lines or names, and the count of the others. usual: their number without `verbose`."""
    shown, more = select_rows(lines, TextView(verbose=verbose), usual)
    lines = (*shown, more) if more else tuple(shown)
    return Text(*lines) if between == "\n" else Text(between.join(lines))


def make_sheet(rows: SheetRows) -> Table:
    """Make a sheet: labels on the left, any contents on the right, indented as one column; empty rows are left out."""
    sheet = Table.grid(padding=(0, 2, 0, 0))
    sheet.add_column(no_wrap=True, style="bold")
    sheet.add_column(overflow="fold")
    for label, content in rows:
        shown = make_renderable(content)
        if shown is not None:
            sheet.add_row(Text(label), shown)
    return sheet


def make_renderable(content: Content | None) -> RenderableType | None:
    """Make a text of a line or lines; None for an empty one. Other renderables stay as they are."""
    if isinstance(content, str):
        content = Text(content)
    elif isinstance(content, (list, tuple, Iterator)):
        content = Text(*content)
    return None if isinstance(content, Text) and not content else content


def format_warning(warning: Caution, style: str = "yellow") -> Text:
    """Format a warning: `warning[W101]: text`, translated for the reader."""
    return Text(f"warning[{warning.code}]: {translate_text(warning)}", style=style)


def make_title(source: str) -> Text:
    """The name of a model's file; "model" for one in memory."""
    return Text(PurePath(source).name or "model", style="bold")


def format_nodes(names: Sequence[str], ops: Sequence[str]) -> str:
    """Format nodes with their operators: conv1 (Conv), fc (Gemm)."""
    return ", ".join(f"{name} ({op})" for name, op in zip(names, ops, strict=True))


def format_verdict(word: str, style: str, text: str) -> Text:
    """Format a verdict, `good: text`, of which the word stands out."""
    return Text(word, style=style).join_text(f": {text}" if text else "")


def format_count(count: int, noun: str) -> str:
    """Format a number of things: 1 model, 2 models."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def format_figure(value: float | None, form: str, unit: str = "", *, before: str = "") -> str:
    """Format a figure by `form` with its unit; "" for None and nan. before: a text in front of it."""
    return "" if value is None or math.isnan(value) else f"{before}{value:{form}}{unit}"


def format_bytes(count: int) -> str:
    """Format bytes: 18.6 MB."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        # What rounds to 1000 is shown as 1 of the next unit.
        if value < 999.5 or unit == "GB":
            break
        value /= 1000
    # Three significant digits; 99.95 would round to four.
    return f"{value:.1f} {unit}" if value < 99.95 and unit != "B" else f"{value:.0f} {unit}"


def format_decibel(value: float) -> str:
    """Format decibels: 16.5 dB; inf is "exact", nan "n/a"."""
    if math.isnan(value):
        return "n/a"
    return ("exact" if value > 0 else "-inf dB") if math.isinf(value) else f"{value:.1f} dB"


def part_text(name: str, part: str, whole_db: float) -> Text:
    """A line for an output that is judged by a part of it."""
    return Text(
        f"{part} is the part of {name} that is farthest; as a whole it has {format_decibel(whole_db)}",
        style="dim",
    )


def list_choices(choices: Sequence[ChoiceAgreement]) -> list[Text]:
    """Lines on how far the quantized model chooses as the float model does, the worst first."""
    ranked = sorted(choices, key=lambda choice: choice.share)
    lines = [Text(_describe_choice(choice), style="dim") for choice in ranked[:_CHOICES]]
    more = len(ranked) - len(lines)
    return [*lines, *list_more(f"and {more} more, no worse" if more else "")]


def _describe_choice(choice: ChoiceAgreement) -> str:
    """The number of those that are the same, and the outputs that are compared on the float model's."""
    same = f"{choice.shared:.4g} of {choice.chosen:.4g} chosen are the same as in float"
    if choice.chosen == 1:
        same = f"{100 * choice.shared:.4g} % of the choices are the same as in float"
    if not choice.chosen:
        same = "nothing is chosen on these samples"
    behind = (
        f"; {', '.join(choice.outputs)}: compared on the float model's choice"
        if choice.outputs
        else ""
    )
    decided = f"; decides {', '.join(choice.decides)}" if choice.decides else ""
    return f"{choice.node} ({choice.op}): {same}{decided}{behind}"


def format_milliseconds(value: float) -> str:
    """Format milliseconds with three significant digits: 0.305 ms, 5.31 ms, 120 ms."""
    if not math.isfinite(value) or value <= 0:
        return "n/a"
    # log10 is the place of the first digit: 0 for 1 to 10, -1 for 0.1 to 1.
    digits = max(0, 2 - math.floor(math.log10(value)))
    return f"{value:.{digits}f} ms"


def format_seconds(value: float) -> str:
    """Format seconds: 0.4 s, 12 s, 3 min 05 s."""
    if value >= 59.5:  # which rounds to a minute
        whole = round(value)
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{value:.1f} s" if value < 9.95 else f"{value:.0f} s"


def format_threads(count: int) -> str:
    """Format a number of threads: 1 thread, all threads."""
    return format_count(count, "thread") if count else "all threads"


def format_shapes(shapes: Mapping[str, Sequence[int]]) -> str:
    """Format the sizes of inputs, those of one size together: x 1x3x224x224, ids and mask 1x192."""
    names = defaultdict(list)
    for name, shape in shapes.items():
        names["x".join(map(str, shape)) or "scalar"].append(name)
    parts = []
    for size, members in names.items():
        # Caches come by the dozen.
        listed = members if len(members) < 4 else (members[0], f"{len(members) - 1} more")
        parts.append(f"{' and '.join(listed)} {size}")
    return ", ".join(parts)


def format_scale(low: float, high: float) -> str:
    """Format one scale, or the least and greatest of many."""
    return f"{low:.3g}" if low == high else f"{low:.3g}..{high:.3g}"
