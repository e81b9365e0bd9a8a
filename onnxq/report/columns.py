"""Tables and text that fit a terminal: long names lose their middle and never break over lines."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text as RichText

from onnxq.errors import escape_line
from onnxq.sites import NameSet

# All in terminal columns. Space between two columns of a table.
_GAP = 2
# Least width of a column of names or text, however narrow the terminal is.
_LEAST = 8
# Names shortened further than this look alike: they get a line of their own.
_TELLING = 24
_INDENT = 2
# Text in a narrower column is hard to read.
_FEW = 12
# Positions at which names may lose letters, as shares of their width; the one that keeps most names distinct is used.
_CUTS = (0.5, 0.33, 0.67)


class Text(RichText):
    """Text for the terminal: each argument is a line, in which names are escaped; an empty line without one.

    It is the only text that reports print. Lines break between words only; a longer word loses its middle.
    """

    def __init__(self, *lines: str, style: str = "") -> None:
        super().__init__("\n".join(map(escape_line, lines)), style)

    def join_text(self, text: str, style: str = "") -> Text:
        """Write more text behind it, on the same line; returns itself."""
        self.append(escape_line(text), style)
        return self

    def join_facts(self, facts: Iterable[str]) -> Text:
        """Write facts behind a title, in parentheses; returns itself."""
        return self.join_text(f"  ({', '.join(facts)})", style="dim")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        widest = super().__rich_measure__(console, options).maximum
        return Measurement(min(_LEAST, widest), widest)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[Segment]:
        return RichText.__rich_console__(fit_words(self, options.max_width), console, options)


def shorten_name(name: str, width: int, cut: float = 0.5) -> str:
    """Shorten a name to `width` columns by "…" in place of its middle. cut: share of the width before it."""
    if cell_len(name) <= width:
        return name
    head = int((width - 1) * cut)
    return f"{_take_columns(name, head)}…{_take_columns(name[::-1], width - 1 - head)[::-1]}"


def _take_columns(name: str, width: int) -> str:
    """Return as many letters as fit; some are two columns wide."""
    end = width
    while cell_len(name[:end]) > width:
        end -= 1
    return name[: max(end, 0)]


def fit_words(text: RichText, width: int) -> RichText:
    """Shorten words longer than `width`, so that the text breaks between words only."""
    if max(map(cell_len, text.plain.split()), default=0) <= width:
        return text
    # On rich's Text instead of strings, which keeps styles.
    lines = (
        RichText(" ").join(_fit_word(word, width) for word in line.split(" ", allow_blank=True))
        for line in text.split("\n", allow_blank=True)
    )
    return RichText("\n", style=text.style).join(lines)


def _fit_word(word: RichText, width: int) -> RichText:
    short = shorten_name(word.plain, width)
    if short == word.plain:
        return word
    head, tail = short.split("…", 1)
    fitted = word[: len(head)].append("…")
    return fitted.append_text(word[len(word) - len(tail) :]) if tail else fitted


@dataclass(frozen=True, eq=False)
class Rows:
    """A table without borders. Headers break between words.

    If little would be left of the names in the first column, each gets a line above the rest of its row.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    # Columns of numbers.
    right: NameSet
    # Columns of names on one line; their middle is cut if space is short.
    names: NameSet
    # Columns of text, which breaks between words.
    fold: NameSet

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        widths = self._measure_columns(headers=True)
        widest = min(_add_gaps(widths), options.max_width)
        return Measurement(min(_LEAST * len(widths), widest), widest)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = self._choose_widths(options.max_width)
        if self.columns[0] in self.names:
            whole = self._measure_columns(headers=True)[0]
            if widths[0] < min(whole, _TELLING) or _add_gaps(widths) > options.max_width:
                yield from self._stack_rows(options.max_width)
                return
        table = self._make_table(widths)
        for row in self._make_cells(widths):
            table.add_row(*row)
        yield table

    def _make_table(self, widths: Sequence[int], *, header: bool = True) -> Table:
        table = Table(
            box=None, pad_edge=False, padding=(0, _GAP, 0, 0), show_edge=False, show_header=header
        )
        for name, width in zip(self.columns, widths, strict=True):
            table.add_column(
                _wrap_header(name, width),
                justify="right" if name in self.right else "left",
                width=width,
                no_wrap=name not in self.fold,
                overflow="ellipsis",
                header_style="bold",
            )
        return table

    def _stack_rows(self, width: int) -> RenderResult:
        """Render each name above the indented rest of its row; columns that do not fit get lines of their own, too."""
        rest = self._drop_columns({self.columns[0]})
        below = list[str]()
        while (last := rest._find_excess(width - _INDENT)) is not None:
            below.insert(0, last)
            rest = rest._drop_columns({last})
        widths = rest._choose_widths(width - _INDENT)
        yield Text(self.columns[0], style="bold")
        yield Padding.indent(rest._make_table(widths), _INDENT)
        names = _shorten_names([row[0] for row in self.rows], width)
        for name, row, cells in zip(names, self.rows, rest._make_cells(widths), strict=True):
            line = rest._make_table(widths, header=False)
            line.add_row(*cells)
            yield Text(name)
            yield Padding.indent(line, _INDENT)
            for column in below:
                yield Padding.indent(Text(f"{column}: {row[self.columns.index(column)]}"), _INDENT)

    def _drop_columns(self, names: Collection[str]) -> Rows:
        left = [k for k, name in enumerate(self.columns) if name not in names]
        rows = [[row[k] for k in left] for row in self.rows]
        return replace(self, columns=[self.columns[k] for k in left], rows=rows)

    def _find_excess(self, width: int) -> str | None:
        """Return the last column of names or text, without them of numbers, if it must go for the others to fit."""
        widths = self._measure_columns(headers=False)
        flexible = self._find_flexible()
        needs = [min(most, _FEW) if k in flexible else most for k, most in enumerate(widths)]
        last = flexible[-1] if flexible else -1
        return self.columns[last] if len(needs) > 1 and _add_gaps(needs) > width else None

    def _find_flexible(self) -> list[int]:
        """Return the positions of the columns of names or text, which may be narrower than their contents."""
        return [k for k, name in enumerate(self.columns) if name in self.names or name in self.fold]

    def _make_cells(self, widths: Sequence[int]) -> Iterator[tuple[Text, ...]]:
        """Make the cells, row by row."""
        columns = []
        for k, (name, width) in enumerate(zip(self.columns, widths, strict=True)):
            texts = [row[k] for row in self.rows]
            columns.append(map(Text, _shorten_names(texts, width) if name in self.names else texts))
        return zip(*columns, strict=True)

    def _measure_columns(self, *, headers: bool) -> list[int]:
        """Return the width of each column if nothing is cut. headers: on one line."""
        widths = []
        for k, name in enumerate(self.columns):
            texts = [row[k] for row in self.rows] + ([name] if headers else name.split())
            widths.append(max(map(cell_len, texts), default=0))
        return widths

    def _choose_widths(self, width: int) -> list[int]:
        """Choose widths that fit: if headers of one line do not, numbers keep theirs, names and text share the rest."""
        widths = self._measure_columns(headers=True)
        if _add_gaps(widths) <= width:
            return widths
        widths = self._measure_columns(headers=False)
        flexible = sorted(self._find_flexible(), key=widths.__getitem__)
        rest = width - _add_gaps(widths) + sum(widths[k] for k in flexible)
        # Small requests are granted, the others get equal shares.
        for position, k in enumerate(flexible):
            widths[k] = min(widths[k], max(rest // (len(flexible) - position), _LEAST))
            rest -= widths[k]
        return widths


def _add_gaps(widths: Sequence[int]) -> int:
    """Return the width of a table."""
    return sum(widths) + _GAP * (len(widths) - 1)


def _wrap_header(header: str, width: int) -> Text:
    lines: list[str] = []
    for word in header.split():
        if lines and cell_len(lines[-1]) + 1 + cell_len(word) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return Text(*lines)


def _shorten_names(names: Sequence[str], width: int) -> list[str]:
    """Shorten names at the position that keeps most of them distinct."""
    candidates = [[shorten_name(name, width, cut) for name in names] for cut in _CUTS]
    return max(candidates, key=lambda candidate: len(set(candidate)))
