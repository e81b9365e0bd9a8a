"""Tables and text that fit a terminal: names too long for their place lose their middle and never break over lines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

# Between two columns.
_GAP = 2
# What a column of names or text keeps however narrow the terminal is.
_LEAST = 8
# Where names may lose letters: the place after which most of them still differ is taken.
_CUTS = (0.5, 0.33, 0.67)


def shorten(name: str, width: int, cut: float = 0.5) -> str:
    """The name in `width` columns: whole, or with "…" in the place of its middle; `cut`: the part kept before it."""
    if cell_len(name) <= width:
        return name
    head = int((width - 1) * cut)
    return f"{_first(name, head)}…{_first(name[::-1], width - 1 - head)[::-1]}"


def _first(name: str, width: int) -> str:
    """As many letters as fit; some are two columns wide."""
    end = width
    while cell_len(name[:end]) > width:
        end -= 1
    return name[: max(end, 0)]


def fit_words(text: Text, width: int) -> Text:
    """The text with words longer than `width` shortened, so that it breaks between words only."""
    if max(map(cell_len, text.plain.split()), default=0) <= width:
        return text
    lines = []
    for line in text.split("\n", allow_blank=True):
        words = line.split(" ", allow_blank=True)
        lines.append(Text(" ").join(_fit_word(word, width) for word in words))
    return Text("\n", style=text.style).join(lines)


def _fit_word(word: Text, width: int) -> Text:
    short = shorten(word.plain, width)
    if short == word.plain:
        return word
    head, tail = short.split("…", 1)
    return word[: len(head)].append("…").append_text(word[len(word) - len(tail) :] if tail else Text())


@dataclass(frozen=True, eq=False)
class Fitted:
    """Text of which no word breaks over lines."""

    text: Text

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        widest = Measurement.get(console, options, self.text).maximum
        return Measurement(min(_LEAST, widest), widest)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield fit_words(self.text, options.max_width)


def fitted(shown: RenderableType) -> RenderableType:
    """The same, with every text in it fitted."""
    if isinstance(shown, Text):
        return Fitted(shown)
    return Group(*map(fitted, shown.renderables)) if isinstance(shown, Group) else shown


@dataclass(frozen=True, eq=False)
class Rows:
    """A table without borders. right: columns of numbers. names: columns of one line that lose their middle when space
    is short. fold: columns of text, which break between words. Headers break between words too.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()
    fold: frozenset[str] = frozenset()

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        widths = self._natural(headers=True)
        widest = min(sum(widths) + _GAP * (len(widths) - 1), options.max_width)
        return Measurement(min(_LEAST * len(widths), widest), widest)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = self._natural(headers=True)
        if sum(widths) + _GAP * (len(widths) - 1) > options.max_width:
            widths = self._squeezed(options.max_width)
        table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, _GAP, 0, 0), show_edge=False)
        for name, width in zip(self.columns, widths, strict=True):
            table.add_column(
                _wrapped(name, width), justify="right" if name in self.right else "left", width=width,
                no_wrap=name not in self.fold, overflow="ellipsis", vertical="top",
            )  # fmt: skip
        cells = [self._cells(k, width) for k, width in enumerate(widths)]
        for row in zip(*cells, strict=True):
            table.add_row(*row)
        yield table

    def _cells(self, k: int, width: int) -> list[Text]:
        column = [row[k] for row in self.rows]
        if self.columns[k] in self.names:
            return [Text(name) for name in _shortened(column, width)]
        return [fit_words(Text(cell), width) if self.columns[k] in self.fold else Text(cell) for cell in column]

    def _natural(self, *, headers: bool) -> list[int]:
        """What each column takes if nothing is cut. headers: on one line."""
        widths = []
        for k, name in enumerate(self.columns):
            words = [name] if headers else name.split()
            lines = (line for row in self.rows for line in row[k].split("\n"))
            widths.append(max([*map(cell_len, words), *map(cell_len, lines)], default=0))
        return widths

    def _squeezed(self, width: int) -> list[int]:
        """Widths that fit: numbers keep what they need, names and text share the rest."""
        widths = self._natural(headers=False)
        giving = {k: widths[k] for k, name in enumerate(self.columns) if name in self.names or name in self.fold}
        rest = width - _GAP * (len(widths) - 1) - sum(w for k, w in enumerate(widths) if k not in giving)
        shares = _share(rest, giving)
        return [shares.get(k, w) for k, w in enumerate(widths)]


def _share(rest: int, wanted: Mapping[int, int]) -> dict[int, int]:
    """`rest` shared out: who wants little gets it, the others the same each."""
    found: dict[int, int] = {}
    for done, (k, want) in enumerate(sorted(wanted.items(), key=lambda one: one[1])):
        found[k] = min(want, max(rest // (len(wanted) - done), _LEAST))
        rest -= found[k]
    return found


def _wrapped(header: str, width: int) -> Text:
    lines: list[str] = []
    for word in header.split():
        if lines and cell_len(lines[-1]) + 1 + cell_len(word) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return Text("\n".join(lines))


def _shortened(names: Iterable[str], width: int) -> list[str]:
    """The names cut where most of them still differ."""
    column = list(names)
    tried = [[shorten(name, width, cut) for name in column] for cut in _CUTS]
    return max(tried, key=lambda one: len(set(one)))
