"""The figures of the house: size, names, prose, comments and imports of onnxq and torch_frontend.

    python benchmarks/house.py                 the table; 1 as exit code where a limit does not hold
    python benchmarks/house.py --rooms         a row for each room
    python benchmarks/house.py --list vague    offenders by file and line; --help says which figures have some
    python benchmarks/house.py --write         the table, into docs/architecture.md
    python benchmarks/house.py --ratchet       limits moved to today's figures, and the table written

The limits stand in house.json, and tests/benchmarks/test_house.py holds them. A limit that is not its goal yet is a
ratchet: `--ratchet` moves it towards the goal and never back. What ruff and import-linter check is no figure.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("onnxq", "torch_frontend")
LIMITS = Path(__file__).with_name("house.json")
PAGE = ROOT / "docs" / "architecture.md"
MARKS = ("<!-- figures: begin -->\n", "<!-- figures: end -->")
# Lines that a function and a file may have.
SCREEN, PAGES = 60, 500

# Names that say nothing of what they hold; `numbers` stood for qparams, `levels` for quantized values.
VAGUE = re.compile("one|found|held|made|told|seen|given|few|kept|wished|asked|numbers|levels")
# What ends in -ed or -en and is none, as the first word of a name.
_NO_PARTICIPLES = re.compile(
    r"between|bleed|breed|broaden|children|deepen|den|embed|even|exceed|fasten|feed|flatten|gen|golden|"
    r"happen|harden|indeed|len|lengthen|lighten|listen|need|often|open|proceed|screen|seed|seven|sharpen|"
    r"shed|shorten|shred|soften|speed|strengthen|succeed|ten|then|tighten|token|unflatten|weed|when|widen"
)
# Irregular ones that are no verb in the present tense too, as read, cut, set, put, run and split are.
_IRREGULAR = re.compile(
    r"begun|born|borne|bought|brought|built|burnt|caught|dealt|done|drawn|fed|felt|flown|fought|found|"
    r"gone|got|grown|heard|held|hung|kept|known|laid|learnt|led|lent|lost|made|meant|met|paid|said|sang|"
    r"seen|sent|shown|sold|spent|spun|stood|stuck|sung|swept|swung|taught|thought|thrown|told|torn|"
    r"understood|undone|unseen|went|won|worn"
)
# Strings, which may hold a "#", or in group 1 a comment.
_COMMENTS = re.compile(
    r'"""(?:\\.|[^\\])*?"""|\'\'\'(?:\\.|[^\\])*?\'\'\'|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|(#.*)'
)
# Comments that speak to a tool.
_DIRECTIVES = re.compile(r"#\s*(fmt:|noqa|type:|pragma|mypy:|ruff:)")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Function = ast.FunctionDef | ast.AsyncFunctionDef
# `limit` and `goal` of each figure.
Limits = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Place:
    """A line of a file that a figure counts."""

    path: Path
    line: int
    name: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT).as_posix()}:{self.line}: {self.name}"


@dataclass(frozen=True)
class Source:
    """One Python file, read once."""

    path: Path

    @cached_property
    def text(self) -> str:
        """Its text."""
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Every node of the syntax tree, the module first."""
        return list(ast.walk(ast.parse(self.text)))

    @cached_property
    def module(self) -> str:
        """The dotted name."""
        return ".".join(self.path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")

    @property
    def room(self) -> str:
        """The package and the part of it that the file belongs to."""
        parts = self.path.relative_to(ROOT).with_suffix("").parts
        return "/".join(parts[:2]) if parts[1] != "__init__" else parts[0]

    @property
    def lines(self) -> int:
        """All lines, blank ones too."""
        return len(self.text.splitlines())

    @cached_property
    def docstrings(self) -> list[ast.Constant]:
        """The docstrings of the module, its classes and its functions."""
        kinds = (ast.Module, ast.ClassDef, *_FUNCTIONS)
        owners = [
            node
            for node in self.nodes
            if isinstance(node, kinds) and ast.get_docstring(node) is not None
        ]
        return [owner.body[0].value for owner in owners]  # type: ignore[attr-defined]

    @property
    def docstring_words(self) -> list[str]:
        """The words of all docstrings."""
        return [word for doc in self.docstrings for word in re.findall(r"\w+", str(doc.value))]

    @cached_property
    def comments(self) -> list[int]:
        """Lines of comments for people; a comment of three lines counts three times."""
        matches = [
            match
            for match in _COMMENTS.finditer(self.text)
            if match[1] and not _DIRECTIVES.match(match[1])
        ]
        return [self.text.count("\n", 0, match.start()) + 1 for match in matches]

    @cached_property
    def code(self) -> int:
        """Lines of code: without blank lines, comments and docstrings."""
        bare = _COMMENTS.sub(lambda match: "" if match[1] else match[0], self.text).splitlines()
        prose = {
            line for doc in self.docstrings for line in range(doc.lineno, (doc.end_lineno or 0) + 1)
        }
        return sum(bool(text.strip()) and line not in prose for line, text in enumerate(bare, 1))

    @cached_property
    def import_lines(self) -> int:
        """Lines of import statements."""
        statements = [node for node in self.nodes if isinstance(node, (ast.Import, ast.ImportFrom))]
        return sum((node.end_lineno or 0) - node.lineno + 1 for node in statements)

    @property
    def functions(self) -> Iterator[Function]:
        """Functions of the module itself, without dunder methods and main."""
        for node in self.nodes[0].body:  # type: ignore[attr-defined]
            if (
                isinstance(node, _FUNCTIONS)
                and node.name != "main"
                and not node.name.startswith("__")
            ):
                yield node

    @property
    def methods(self) -> Iterator[Function]:
        """Methods that are neither properties nor dunder methods."""
        for owner in self.nodes:
            for node in owner.body if isinstance(owner, ast.ClassDef) else ():
                if not isinstance(node, _FUNCTIONS) or node.name.startswith("__"):
                    continue
                if not any("property" in ast.dump(decorator) for decorator in node.decorator_list):
                    yield node

    @property
    def stored_names(self) -> Iterator[tuple[int, str]]:
        """Line and name of each local, argument and attribute, wherever it is set."""
        for node in self.nodes:
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.lineno, node.id
            elif isinstance(node, ast.arg):
                yield node.lineno, node.arg
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                yield node.lineno, node.attr

    def list_imports(self, modules: frozenset[str]) -> set[str]:
        """Modules of the project that it imports, at the top, lazily or by `import_module`; not for types alone."""
        for_types = set()
        for node in self.nodes:
            if (
                isinstance(node, ast.If)
                and isinstance(node.test, ast.Name)
                and node.test.id == "TYPE_CHECKING"
            ):
                for_types.update(*map(ast.walk, node.body))
        imports: set[str] = set()
        for node in self.nodes:
            if node in for_types:
                continue
            if isinstance(node, ast.Import):
                imports.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                imports |= inner & modules
                imports |= {node.module} if inner - modules else set()
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
                imports.update(word.value for word in node.args if isinstance(word, ast.Constant))
        return (imports & modules) - {self.module}


def is_participle(name: str) -> bool:
    """True for a name whose first word is a past participle such as `made` or `ranged`; not for `feed` or `flatten`."""
    word = name.strip("_").split("_")[0]
    regular = word.endswith(("ed", "en")) and len(word) > 3 and not _NO_PARTICIPLES.fullmatch(word)
    return regular or _IRREGULAR.fullmatch(word) is not None


def find_cycle(graph: dict[str, set[str]]) -> list[str]:
    """The modules of one circle, the first again at the end; empty without any. graph: module -> its imports."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@dataclass(frozen=True)
class House:
    """Some files. tests: lines of the tests that are theirs; None for a room, of which they are not known."""

    sources: Sequence[Source]
    tests: int | None = None
    _places: dict[str, list[Place]] = field(default_factory=dict, compare=False)

    def list_offenders(self, figure: str) -> list[Place]:
        """The places that a figure counts, in order."""
        if figure not in self._places:
            find = FIGURES[figure].find
            self._places[figure] = list(find(self)) if find is not None else []
        return self._places[figure]

    def sum_sources(self, count: Callable[[Source], Any]) -> int:
        """The sum over all files of a number, or of the length of a list or generator."""
        values = [count(source) for source in self.sources]
        return sum(value if isinstance(value, int) else sum(1 for _ in value) for value in values)

    @cached_property
    def code(self) -> int:
        """Lines of code."""
        return self.sum_sources(lambda source: source.code)

    @cached_property
    def expressions(self) -> int:
        """Expressions in the syntax trees: the size that squeezing lines does not lower."""
        return self.sum_sources(
            lambda source: sum(isinstance(node, ast.expr) for node in source.nodes)
        )

    @cached_property
    def figures(self) -> dict[str, float]:
        """The value of each figure; for a room of those that rooms have."""
        names = [
            name for name, figure in FIGURES.items() if self.tests is not None or not figure.whole
        ]
        return {name: FIGURES[name].measure(self) for name in names}

    def measure_share(
        self, figure: str, count: Callable[[Source], Any], scale: float = 100
    ) -> float:
        """The offenders of a figure, in a hundred of all that is counted."""
        return scale * len(self.list_offenders(figure)) / max(self.sum_sources(count), 1)


@dataclass(frozen=True)
class Figure:
    """One figure: its label, its measure, and the places that it counts. whole: only the whole house has it."""

    label: str
    measure: Callable[[House], float]
    find: Callable[[House], Iterable[Place]] | None = None
    at_least: bool = False
    whole: bool = False

    def holds(self, value: float, limit: float) -> bool:
        """True if a value keeps the limit."""
        return value >= limit if self.at_least else value <= limit


def _list_named(
    nodes: Callable[[Source], Iterable[Any]], is_bad: Callable[[str], bool]
) -> Callable[[House], Any]:
    """Lists the definitions whose name is bad."""
    return lambda house: (
        Place(source.path, node.lineno, node.name)
        for source in house.sources
        for node in nodes(source)
        if is_bad(node.name)
    )


def _list_what(house: House) -> Iterator[Place]:
    for source in house.sources:
        for doc in source.docstrings:
            for match in re.finditer(r"\bwhat\b", str(doc.value), re.IGNORECASE):
                line = doc.lineno + str(doc.value)[: match.start()].count("\n")
                yield Place(source.path, line, source.text.splitlines()[line - 1].strip(' "'))


def _list_uncommented(house: House) -> Iterator[Place]:
    goal = read_limits()["comments"]["goal"]
    for source in house.sources:
        if 100 * len(source.comments) < goal * source.lines:
            yield Place(source.path, 1, f"{len(source.comments)} comments in {source.lines} lines")


def _list_long_functions(house: House) -> Iterator[Place]:
    for source in house.sources:
        for node in source.nodes:
            if isinstance(node, _FUNCTIONS) and (node.end_lineno or 0) - node.lineno >= SCREEN:
                yield Place(source.path, node.lineno, node.name)


def _list_twins(house: House) -> Iterator[Place]:
    places: dict[str, list[Place]] = {}
    for source in house.sources:
        for node in source.nodes:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(Place(source.path, node.lineno, node.name))
    for name in sorted(places):
        if len({place.path for place in places[name]}) > 1:
            yield from places[name]


def _list_cycle(house: House) -> list[Place]:
    modules = frozenset(source.module for source in house.sources)
    cycle = find_cycle({source.module: source.list_imports(modules) for source in house.sources})
    return [Place(ROOT / module.replace(".", "/"), 1, "imports the next one") for module in cycle]


def _list_entered(house: House) -> list[Place]:
    """The files of which one `quantize` of a small net calls a function, counted in a process of its own."""
    child = [sys.executable, "-m", "benchmarks.house_entered"]
    printed = subprocess.run(child, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    return [Place(Path(path), 1, "entered") for path in printed.splitlines()]


# In the order of the table.
FIGURES: dict[str, Figure] = {
    "expressions": Figure(
        "expressions, thousands", lambda house: house.expressions / 1000, whole=True
    ),
    "density": Figure(
        "expressions per line of code", lambda house: house.expressions / max(house.code, 1)
    ),
    "imports": Figure(
        "lines of imports, % of code",
        lambda house: (
            100 * house.sum_sources(lambda source: source.import_lines) / max(house.code, 1)
        ),
    ),
    "file": Figure(
        "lines of code in a file, mean",
        lambda house: house.code / len(house.sources),
        at_least=True,
    ),
    "longest": Figure(
        "lines of the longest file",
        lambda house: max(source.lines for source in house.sources),
        lambda house: [Place(s.path, s.lines, "lines") for s in house.sources if s.lines > PAGES],
    ),
    "long-functions": Figure(
        f"functions over {SCREEN} lines",
        lambda house: len(house.list_offenders("long-functions")),
        _list_long_functions,
    ),
    "folder": Figure(
        "most files in one folder",
        lambda house: max(
            Counter(s.path.parent for s in house.sources if s.path.name != "__init__.py").values(),
            default=0,
        ),
    ),
    "entered": Figure(
        "files entered by one `quantize` of a small net",
        lambda house: len(house.list_offenders("entered")),
        _list_entered,
        whole=True,
    ),
    "cycle": Figure(
        "modules of a circle of imports, lazy ones included",
        lambda house: len(house.list_offenders("cycle")),
        _list_cycle,
    ),
    "vague": Figure(
        "stored names that say nothing, %",
        lambda house: house.measure_share("vague", lambda source: source.stored_names),
        lambda house: (
            Place(source.path, line, name)
            for source in house.sources
            for line, name in source.stored_names
            if VAGUE.fullmatch(name)
        ),
    ),
    "twins": Figure(
        "class names that stand in two files",
        lambda house: len({place.name for place in house.list_offenders("twins")}),
        _list_twins,
        whole=True,
    ),
    "one-word-methods": Figure(
        "methods with a one-word name, %",
        lambda house: house.measure_share("one-word-methods", lambda source: source.methods),
        _list_named(lambda source: source.methods, lambda name: "_" not in name.strip("_")),
    ),
    "one-word": Figure(
        "module functions with a one-word name, %",
        lambda house: house.measure_share("one-word", lambda source: source.functions),
        _list_named(lambda source: source.functions, lambda name: "_" not in name.strip("_")),
    ),
    "participles": Figure(
        "module functions whose first word is a past participle, %",
        lambda house: house.measure_share("participles", lambda source: source.functions),
        _list_named(lambda source: source.functions, is_participle),
    ),
    "public-participles": Figure(
        "public ones of these",
        lambda house: sum(
            not place.name.startswith("_") for place in house.list_offenders("participles")
        ),
    ),
    "comments": Figure(
        "comments per 100 lines of all",
        lambda house: (
            100
            * house.sum_sources(lambda s: s.comments)
            / max(house.sum_sources(lambda s: s.lines), 1)
        ),
        _list_uncommented,
        at_least=True,
    ),
    "what": Figure(
        '"what" per 1,000 words of docstrings',
        lambda house: house.measure_share(
            "what", lambda source: source.docstring_words, scale=1000
        ),
        _list_what,
    ),
    "what-first": Figure(
        'docstrings that start with "What"',
        lambda house: len(house.list_offenders("what-first")),
        lambda house: (
            Place(source.path, doc.lineno, str(doc.value).splitlines()[0])
            for source in house.sources
            for doc in source.docstrings
            if re.match(r"What\b", str(doc.value))
        ),
    ),
    "tests": Figure(
        "lines of tests, thousands",
        # Whole ones: a ratchet of single lines would leave no room for the test of the next bug.
        lambda house: math.ceil((house.tests or 0) / 1000),
        whole=True,
    ),
}


def read_house() -> House:
    """The whole project."""
    sources = [
        Source(path) for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))
    ]
    tests = sum(len(path.read_bytes().splitlines()) for path in (ROOT / "tests").rglob("*.py"))
    return House(sources, tests)


def read_limits() -> Limits:
    """Limit and goal of each figure, and its value before each engine had a folder (584 files)."""
    return json.loads(LIMITS.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def tighten_limits(house: House) -> Limits:
    """The limits, each at its goal where that is reached, and else at today's value where that is nearer."""
    limits = read_limits()
    for name, value in house.figures.items():
        figure, bounds = FIGURES[name], limits[name]
        # Two digits behind the point, on the side where the value still holds.
        today = (math.floor if figure.at_least else math.ceil)(100 * value) / 100
        if figure.holds(value, bounds["goal"]):
            bounds["limit"] = bounds["goal"]
        elif figure.holds(value, bounds["limit"]):
            bounds["limit"] = today
    return limits


def write_limits(limits: Limits) -> None:
    """Write house.json, a line for each figure."""
    lines = [f"  {json.dumps(name)}: {json.dumps(bounds)}" for name, bounds in limits.items()]
    LIMITS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def make_table(house: House) -> str:
    """The figures as a table in Markdown, beside limits and goals."""
    rows = ["| figure | before | now | limit | goal |", "|---|---:|---:|---:|---:|"]
    limits = read_limits()
    for name, value in house.figures.items():
        sign = "≥" if FIGURES[name].at_least else "≤"
        bounds = " | ".join(f"{sign} {limits[name][bound]:.3g}" for bound in ("limit", "goal"))
        rows.append(
            f"| {FIGURES[name].label} | {limits[name]['before']:.3g} | {value:.3g} | {bounds} |"
        )
    return "\n".join(rows) + "\n"


def make_rooms(house: House) -> str:
    """A row for each room and one for all, as text: files, lines of code, expressions, and the figures of rooms."""
    rooms: dict[str, list[Source]] = {}
    for source in house.sources:
        rooms.setdefault(source.room, []).append(source)
    kinds = (
        "density",
        "imports",
        "file",
        "longest",
        "vague",
        "one-word-methods",
        "one-word",
        "comments",
    )
    lines = [
        f"{'room':32}{'files':>7}{'code':>7}{'expr':>8}" + "".join(f"{kind:>18}" for kind in kinds)
    ]
    for room, sources in [*sorted(rooms.items()), ("all", list(house.sources))]:
        part = House(sources)
        figures = "".join(f"{part.figures[kind]:>18.3g}" for kind in kinds)
        lines.append(f"{room:32}{len(sources):>7}{part.code:>7}{part.expressions:>8}{figures}")
    return "\n".join(lines)


def write_table(house: House) -> None:
    """Put the table between its marks in docs/architecture.md."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(MARKS[0])
    _, mark, after = rest.partition(MARKS[1])
    PAGE.write_text(before + MARKS[0] + make_table(house) + mark + after, encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 1 where a limit does not hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    modes = parser.add_mutually_exclusive_group()
    for mode in ("rooms", "write", "ratchet"):
        modes.add_argument(f"--{mode}", action="store_true")
    modes.add_argument(
        "--list", choices=sorted(name for name, figure in FIGURES.items() if figure.find)
    )
    options, house = parser.parse_args(arguments), read_house()
    if options.list:
        print(*house.list_offenders(options.list), sep="\n")
    elif options.rooms:
        print(make_rooms(house))
    elif options.ratchet or options.write:
        if options.ratchet:
            write_limits(tighten_limits(house))
        write_table(house)
    else:
        print(make_table(house), end="")
        limits = read_limits()
        return int(
            not all(
                FIGURES[name].holds(value, limits[name]["limit"])
                for name, value in house.figures.items()
            )
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
