"""Tables and text that fit a terminal: long names lose their middle and never break over lines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text as RichText

from onnxq.escapes import escape_line

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
    """Text for the terminal: each argument is a line, in which names are escaped. The only text that reports print."""

    def __init__(self, *lines: str, style: str = "") -> None:
        super().__init__("\n".join(map(escape_line, lines)), style)

    def join_text(self, text: str, style: str = "") -> Text:
        """Write more text behind it, on the same line; returns itself."""
        self.append(escape_line(text), style)
        return self


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
    lines = []
    # On rich's Text instead of strings, which keeps styles.
    for line in text.split("\n", allow_blank=True):
        words = line.split(" ", allow_blank=True)
        lines.append(RichText(" ").join(_fit_word(word, width) for word in words))
    return RichText("\n", style=text.style).join(lines)


def _fit_word(word: RichText, width: int) -> RichText:
    short = shorten_name(word.plain, width)
    if short == word.plain:
        return word
    head, tail = short.split("…", 1)
    return word[: len(head)].append("…").append_text(word[len(word) - len(tail) :] if tail else RichText())


@dataclass(frozen=True, eq=False)
class Fitted:
    """Text whose words never break over lines."""

    text: Text

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        widest = Measurement.get(console, options, self.text).maximum
        return Measurement(min(_LEAST, widest), widest)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield fit_words(self.text, options.max_width)


def fit_renderable(shown: RenderableType) -> RenderableType:
    """Make every text in a renderable break between words only."""
    if isinstance(shown, Text):
        return Fitted(shown)
    return Group(*map(fit_renderable, shown.renderables)) if isinstance(shown, Group) else shown


@dataclass(frozen=True, eq=False)
class Rows:
    """A table without borders. Headers break between words.

    If little would be left of the names in the first column, each gets a line above the rest of its row.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    # Columns of numbers.
    right: frozenset[str] = frozenset()
    # Columns of names on one line; their middle is cut if space is short.
    names: frozenset[str] = frozenset()
    # Columns of text, which breaks between words.
    fold: frozenset[str] = frozenset()

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        widths = self._natural(headers=True)
        widest = min(sum(widths) + _GAP * (len(widths) - 1), options.max_width)
        return Measurement(min(_LEAST * len(widths), widest), widest)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = wanted = self._natural(headers=True)
        if sum(widths) + _GAP * (len(widths) - 1) > options.max_width:
            widths = self._squeezed(options.max_width)
        if self.columns[0] in self.names and widths[0] < min(wanted[0], _TELLING):
            yield from self._stacked(options.max_width)
            return
        table = self._table(widths)
        for row in zip(*(self._cells(k, width) for k, width in enumerate(widths)), strict=True):
            table.add_row(*row)
        yield table

    def _table(self, widths: Sequence[int], *, header: bool = True) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), show_edge=False, show_header=header)
        for name, width in zip(self.columns, widths, strict=True):
            table.add_column(
                _wrap_header(name, width), justify="right" if name in self.right else "left", width=width,
                no_wrap=name not in self.fold, overflow="ellipsis", vertical="top", header_style="bold",
            )  # fmt: skip
        return table

    def _stacked(self, width: int) -> RenderResult:
        """Render each name above the indented rest of its row; columns that do not fit get lines of their own, too."""
        rest = self._only(range(1, len(self.columns)))
        below: list[str] = []
        while (last := rest._too_much(width - _INDENT)) is not None:
            below.insert(0, last)
            rest = rest._only(k for k, name in enumerate(rest.columns) if name != last)
        widths = rest._natural(headers=True)
        if sum(widths) + _GAP * (len(widths) - 1) > width - _INDENT:
            widths = rest._squeezed(width - _INDENT)
        cells = list(zip(*(rest._cells(k, one) for k, one in enumerate(widths)), strict=True))
        yield Text(self.columns[0], style="bold")
        yield Padding(rest._table(widths), (0, 0, 0, _INDENT))
        for k, name in enumerate(self._cells(0, width)):
            line = rest._table(widths, header=False)
            line.add_row(*cells[k])
            yield name
            yield Padding(line, (0, 0, 0, _INDENT))
            for column in below:
                text = Text(f"{column}: {self.rows[k][self.columns.index(column)]}")
                yield Padding(fit_words(text, width - _INDENT), (0, 0, 0, _INDENT))

    def _only(self, columns: Iterable[int]) -> Rows:
        kept = list(columns)
        rows = [[row[k] for k in kept] for row in self.rows]
        return Rows([self.columns[k] for k in kept], rows, self.right, self.names, self.fold)

    def _too_much(self, width: int) -> str | None:
        """Return the last column of names or text if it must be removed for the others to fit."""
        giving = [name for name in self.columns if name in self.names or name in self.fold]
        natural = zip(self.columns, self._natural(headers=False), strict=True)
        needs = [min(most, _FEW) if name in giving else most for name, most in natural]
        return giving[-1] if giving and sum(needs) + _GAP * (len(needs) - 1) > width else None

    def _cells(self, k: int, width: int) -> list[RichText]:
        column = [row[k] for row in self.rows]
        if self.columns[k] in self.names:
            return [Text(name) for name in _shorten_names(column, width)]
        return [fit_words(Text(cell), width) if self.columns[k] in self.fold else Text(cell) for cell in column]

    def _natural(self, *, headers: bool) -> list[int]:
        """Return the width of each column if nothing is cut. headers: on one line."""
        widths = []
        for k, name in enumerate(self.columns):
            words = [name] if headers else name.split()
            widths.append(max([*map(cell_len, words), *(cell_len(row[k]) for row in self.rows)], default=0))
        return widths

    def _squeezed(self, width: int) -> list[int]:
        """Choose widths that fit: numbers keep theirs, names and text share the rest."""
        widths = self._natural(headers=False)
        giving = {k: widths[k] for k, name in enumerate(self.columns) if name in self.names or name in self.fold}
        rest = width - _GAP * (len(widths) - 1) - sum(w for k, w in enumerate(widths) if k not in giving)
        shares = _share_width(rest, giving)
        return [shares.get(k, w) for k, w in enumerate(widths)]


def _share_width(rest: int, wanted: Mapping[int, int]) -> dict[int, int]:
    """Divide `rest` among columns: small requests are granted, the others get equal shares."""
    shares: dict[int, int] = {}
    for done, (k, want) in enumerate(sorted(wanted.items(), key=lambda item: item[1])):
        shares[k] = min(want, max(rest // (len(wanted) - done), _LEAST))
        rest -= shares[k]
    return shares


def _wrap_header(header: str, width: int) -> Text:
    lines: list[str] = []
    for word in header.split():
        if lines and cell_len(lines[-1]) + 1 + cell_len(word) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return Text(*lines)


def _shorten_names(names: Iterable[str], width: int) -> list[str]:
    """Shorten names at the position that keeps most of them distinct."""
    column = list(names)
    tried = [[shorten_name(name, width, cut) for name in column] for cut in _CUTS]
    return max(tried, key=lambda one: len(set(one)))
