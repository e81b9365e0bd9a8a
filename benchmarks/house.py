"""The figures of the house: names, prose, comments, sizes, types, imports of onnxq and torch_frontend.

    python benchmarks/house.py                     the table
    python benchmarks/house.py --rooms             a row for each room
    python benchmarks/house.py --loc               lines of code alone, room by room
    python benchmarks/house.py --list one-word     offenders by file and line; see --help for what can be listed
    python benchmarks/house.py --markdown          the table of docs/architecture.md
    python benchmarks/house.py --write             ... written into it

LIMITS is the one place where limits stand; tests/benchmarks/test_house.py holds them. A limit that is not its goal yet
is a ratchet: it may only be moved towards the goal.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("onnxq", "torch_frontend")
PAGE = ROOT / "docs" / "architecture.md"
MARKS = ("<!-- figures: begin -->\n", "<!-- figures: end -->")
SCREEN = 60  # lines a function may have

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


@dataclass(frozen=True)
class Limit:
    """A bound of one figure. limit: holds now; goal: what is wanted; at_least: the bound is a lower one."""

    what: str
    limit: float
    goal: float
    at_least: bool = False

    def holds(self, value: float) -> bool:
        """True if a figure keeps the limit."""
        return value >= self.limit if self.at_least else value <= self.limit


LIMITS: dict[str, Limit] = {
    "cycles": Limit("modules that import each other in a circle, lazy imports included", 0, 0),
    "longest": Limit("lines of the longest file", 500, 500),
    "long-functions": Limit(f"functions over {SCREEN} lines", 0, 0),
    "folder": Limit("most files in one folder", 20, 20),
    "comments": Limit("comments per 100 lines of code", 4, 4, at_least=True),
    "one-word": Limit("module functions with a one-word name, %", 35, 35),
    "participles": Limit("module functions whose first word is a past participle, %", 3, 3),
    "public-participles": Limit("public ones of these", 0, 0),
    "what": Limit('"what" per 1,000 words of docstrings', 2, 2),
    "what-first": Limit('docstrings that start with "What"', 0, 0),
    "typed": Limit("arguments with a type, %", 100, 100, at_least=True),
    "documented": Limit("public names with a docstring, %", 99, 99, at_least=True),
    "tests": Limit("lines of tests per line of code", 0.9, 0.9, at_least=True),
}


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
    def tree(self) -> ast.Module:
        """Its syntax tree."""
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Every node of the tree."""
        return list(ast.walk(self.tree))

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
    def docstrings(self) -> list[tuple[ast.AST, ast.Constant]]:
        """Each docstring with the module, class or function that has it."""
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        owners = [node for node in self.nodes if isinstance(node, kinds) and ast.get_docstring(node) is not None]
        return [(node, node.body[0].value) for node in owners]  # type: ignore[union-attr, misc]

    @cached_property
    def comments(self) -> list[int]:
        """Lines of comments for people; a comment of three lines counts three times."""
        found = (match for match in _COMMENTS.finditer(self.text) if match[1] and not _DIRECTIVES.match(match[1]))
        return [self.text.count("\n", 0, match.start()) + 1 for match in found]

    @cached_property
    def code(self) -> int:
        """Lines of code: without blank lines, comments and docstrings."""
        bare = _COMMENTS.sub(lambda match: "" if match[1] else match[0], self.text).splitlines()
        prose = {line for _, doc in self.docstrings for line in range(doc.lineno, (doc.end_lineno or 0) + 1)}
        return sum(bool(text.strip()) and line not in prose for line, text in enumerate(bare, 1))

    @property
    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        """Functions of the module itself, without dunder methods and main."""
        for node in self.tree.body:
            named = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name != "main"
            if named and not node.name.startswith("__"):
                yield node

    def imports(self, modules: frozenset[str]) -> set[str]:
        """Modules of the project that it imports, at the top or lazily; not for types alone."""
        typing = {
            inner
            for node in self.nodes
            if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
            for statement in node.body
            for inner in ast.walk(statement)
        }
        found: set[str] = set()
        for node in self.nodes:
            if node in typing:
                continue
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= inner & modules
                found |= {node.module} if inner - modules else set()
        return (found & modules) - {self.module}


def is_participle(word: str) -> bool:
    """True for a past participle such as `made` or `ranged`; not for `feed` or `flatten`."""
    regular = word.endswith(("ed", "en")) and len(word) > 3 and not _NO_PARTICIPLES.fullmatch(word)
    return regular or _IRREGULAR.fullmatch(word) is not None


def find_cycles(graph: dict[str, set[str]]) -> list[tuple[str, ...]]:
    """Groups of modules that reach each other. graph: module -> modules that it imports."""
    ahead: dict[str, set[str]] = {}
    for module in graph:
        reached, todo = set(), list(graph[module])
        while todo:
            one = todo.pop()
            if one not in reached:
                reached.add(one)
                todo += graph.get(one, ())
        ahead[module] = reached
    groups = {tuple(sorted({o for o in ahead[m] if m in ahead.get(o, ())})) for m in graph if m in ahead[m]}
    return sorted(groups)


@dataclass(frozen=True)
class House:
    """The figures of some files. tests: lines of the tests that are theirs; 0: not known, as for a single room."""

    sources: Sequence[Source]
    tests: int = 0
    _held: dict[str, list[Place]] = field(default_factory=dict, compare=False)

    def offenders(self, figure: str) -> list[Place]:
        """The places that a figure of LIMITS counts, in order; for `comments` the files that have too few."""
        if figure not in self._held:
            places = (place for source in self.sources for place in OFFENDERS[figure](source))
            self._held[figure] = list(places)
        return self._held[figure]

    @cached_property
    def code(self) -> int:
        """Lines of code."""
        return sum(source.code for source in self.sources)

    def figures(self) -> dict[str, float]:
        """The value of each figure of LIMITS."""
        modules = frozenset(source.module for source in self.sources)
        cycles = find_cycles({source.module: source.imports(modules) for source in self.sources})
        names = sum(len(list(source.functions)) for source in self.sources)
        words = sum(len(re.findall(r"\w+", doc.value)) for s in self.sources for _, doc in s.docstrings)
        arguments = sum(len(list(_parameters(source))) for source in self.sources)
        public = sum(len(list(_public(source))) for source in self.sources)
        return {
            "cycles": sum(map(len, cycles)),
            "longest": max(source.lines for source in self.sources),
            "long-functions": len(self.offenders("long-functions")),
            "folder": self._largest_folder(),
            "comments": 100 * sum(len(source.comments) for source in self.sources) / max(self.code, 1),
            "one-word": 100 * len(self.offenders("one-word")) / max(names, 1),
            "participles": 100 * len(self.offenders("participles")) / max(names, 1),
            "public-participles": len(self.offenders("public-participles")),
            "what": 1000 * len(self.offenders("what")) / max(words, 1),
            "what-first": len(self.offenders("what-first")),
            "typed": 100 * (1 - len(self.offenders("typed")) / max(arguments, 1)),
            "documented": 100 * (1 - len(self.offenders("documented")) / max(public, 1)),
            "tests": self.tests / max(sum(source.lines for source in self.sources), 1),
        }

    def _largest_folder(self) -> int:
        named = (source.path for source in self.sources if source.path.name != "__init__.py")
        return max(Counter(path.parent for path in named).values(), default=0)


def _parameters(source: Source) -> Iterator[ast.arg]:
    for node in source.nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            every += [arg for arg in (node.args.vararg, node.args.kwarg) if arg is not None]
            yield from (arg for arg in every if arg.arg not in ("self", "cls"))


def _public(source: Source) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for node in source.tree.body:
        if isinstance(node, kinds) and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef):
                yield from (inner for inner in node.body if isinstance(inner, kinds) and not inner.name.startswith("_"))


def _first_word(name: str) -> str:
    return name.strip("_").split("_")[0]


def _names(source: Source, chosen: Callable[[str], bool]) -> Iterator[Place]:
    return (Place(source.path, node.lineno, node.name) for node in source.functions if chosen(node.name))


def _what(source: Source) -> Iterator[Place]:
    for _, doc in source.docstrings:
        for match in re.finditer(r"\bwhat\b", doc.value, re.IGNORECASE):
            line = doc.lineno + doc.value[: match.start()].count("\n")
            yield Place(source.path, line, doc.value.splitlines()[line - doc.lineno].strip())


def _few_comments(source: Source) -> Iterator[Place]:
    wanted = LIMITS["comments"].goal * source.code / 100
    if len(source.comments) < wanted:
        yield Place(source.path, 1, f"{len(source.comments)} comments in {source.code} lines of code")


def _undocumented(source: Source) -> Iterator[Place]:
    documented = {node for node, _ in source.docstrings}
    return (Place(source.path, node.lineno, node.name) for node in _public(source) if node not in documented)


def _long_functions(source: Source) -> Iterator[Place]:
    for node in source.nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = (node.end_lineno or 0) - node.lineno + 1
            if lines > SCREEN:
                yield Place(source.path, node.lineno, f"{node.name} has {lines} lines")


OFFENDERS: dict[str, Callable[[Source], Iterator[Place]]] = {
    "longest": lambda s: iter([Place(s.path, s.lines, "lines")] if s.lines > LIMITS["longest"].goal else []),
    "long-functions": _long_functions,
    "comments": _few_comments,
    "one-word": lambda s: _names(s, lambda name: "_" not in name.strip("_")),
    "participles": lambda s: _names(s, lambda name: is_participle(_first_word(name))),
    "public-participles": lambda s: _names(s, lambda n: not n.startswith("_") and is_participle(_first_word(n))),
    "what": _what,
    "what-first": lambda s: (
        Place(s.path, doc.lineno, doc.value.splitlines()[0])
        for _, doc in s.docstrings
        if re.match("What\\b", doc.value)
    ),
    "typed": lambda s: (Place(s.path, arg.lineno, arg.arg) for arg in _parameters(s) if arg.annotation is None),
    "documented": _undocumented,
}


def read_house() -> House:
    """The whole project."""
    sources = [Source(path) for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    tests = sum(len(path.read_bytes().splitlines()) for path in (ROOT / "tests").rglob("*.py"))
    return House(sources, tests)


def split_rooms(house: House) -> dict[str, House]:
    """The files of each room."""
    rooms: dict[str, list[Source]] = {}
    for source in house.sources:
        rooms.setdefault(source.room, []).append(source)
    return {room: House(sources) for room, sources in sorted(rooms.items())}


def write_number(value: float) -> str:
    """A figure in three digits at most: 1.3, 12.2, 384."""
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.2g}" if value < 10 else f"{value:.1f}"


def make_table(house: House) -> str:
    """The figures as a table in Markdown, beside limits and goals."""
    rows = ["| figure | now | limit | goal |", "|---|---:|---:|---:|"]
    for name, value in house.figures().items():
        limit = LIMITS[name]
        sign = "≥" if limit.at_least else "≤"
        bounds = " | ".join(f"{sign} {write_number(bound)}" for bound in (limit.limit, limit.goal))
        rows.append(f"| {limit.what} | {write_number(value)} | {bounds} |")
    return "\n".join(rows) + "\n"


def make_rooms(house: House) -> str:
    """A row of figures for each room, as text."""
    kinds = ("longest", "folder", "comments", "one-word", "participles", "what", "what-first", "documented")
    lines = [f"{'room':32}{'code':>7}" + "".join(f"{kind:>12}" for kind in kinds)]
    for room, files in split_rooms(house).items():
        values = files.figures()
        lines.append(f"{room:32}{files.code:>7}" + "".join(f"{write_number(values[kind]):>12}" for kind in kinds))
    return "\n".join(lines)


def make_counts(house: House) -> str:
    """Lines of code, comments and docstrings aside, of each room and in all."""
    rows = [(room, files.code) for room, files in split_rooms(house).items()]
    rows += [
        (f"all of {package}", sum(s.code for s in house.sources if s.room.startswith(package))) for package in PACKAGES
    ]
    return "\n".join(f"{room:32}{count:>7}" for room, count in [*rows, ("all", house.code)])


def write_table(house: House) -> None:
    """Put the table between its marks in docs/architecture.md."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(MARKS[0])
    _, mark, after = rest.partition(MARKS[1])
    PAGE.write_text(before + MARKS[0] + make_table(house) + mark + after, encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 1 where a limit does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_mutually_exclusive_group()
    for mode in ("markdown", "rooms", "loc", "write"):
        modes.add_argument(f"--{mode}", action="store_true")
    modes.add_argument("--list", choices=sorted(OFFENDERS))
    options, house = parser.parse_args(arguments), read_house()
    if options.list:
        print(*house.offenders(options.list), sep="\n")
    elif options.rooms or options.loc:
        print(make_rooms(house) if options.rooms else make_counts(house))
    elif options.write:
        write_table(house)
    else:
        print(make_table(house), end="")
        return int(not all(LIMITS[name].holds(value) for name, value in house.figures().items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
