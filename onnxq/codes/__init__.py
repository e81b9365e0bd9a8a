"""Catalogue of errors, refusals and warnings: a stable code, a title, the meaning and the remedy of each.

Q: errors, by area. R: refused requests. F: nodes left float. W: warnings. The entries stand in `catalogue.json`.

The code stands as text where an error, a refusal or a warning is made: `DataError(path, "is empty", code="Q203")`,
`Refusal(node, reason, fix, rule, code="R102")`, `LeftFloat(node, reason, rule, code="F103")`, `Caution("W104", text)`.
Without one, an error has the code of its class. A fault that a person would look up by itself gets an entry in the
catalogue and a function in tests/codes that provokes it.
"""

import json
from dataclasses import dataclass
from importlib import resources

from onnxq.errors import suggest_names


@dataclass(frozen=True)
class Code:
    """A kind of fault, refusal or warning."""

    # Never reused for another kind.
    id: str
    title: str
    # One or two sentences each, for `onnxq explain` and docs/errors.md.
    meaning: str
    fix: str


@dataclass(frozen=True)
class Area:
    """The codes of one part of onnxq. heading: their common beginning, "Q3xx" or "R"."""

    heading: str
    title: str
    codes: tuple[Code, ...]


def _read_areas() -> tuple[Area, ...]:
    text = resources.files(__name__).joinpath("catalogue.json").read_text(encoding="utf-8")
    areas = []
    for heading, area in json.loads(text).items():
        codes = tuple(Code(code, **entry) for code, entry in area["codes"].items())
        areas.append(Area(heading, area["title"], codes))
    return tuple(areas)


# In the order of the page and of `onnxq explain`.
AREAS = _read_areas()
CODES = {code.id: code for area in AREAS for code in area.codes}

# The page is in git and compared with this text by a test.
_HEAD = """# Errors, refusals and warnings by code

`onnxq explain Q303` shows one of them, `onnxq explain` lists all. A code keeps its meaning; the words of a
message may change. In Python every exception has it as `code`, with `kind`, `subject`, `cause`, `fix`, `file` and
`line`; refusals, what is left float and warnings have it too. Where JSON is asked for, a command that fails
prints them as one document on stdout.

This page is made from `onnxq/codes` by `python -m onnxq.codes > docs/errors.md`.
"""


def catalogue_page() -> str:
    """The text of docs/errors.md."""
    parts = [_HEAD]
    for area in AREAS:
        parts.append(f"## {area.heading}: {area.title}\n")
        for code in area.codes:
            parts.append(
                f"### {code.id}: {code.title}\n\n{code.meaning}\n\n**What to do:** {code.fix}\n"
            )
    return "\n".join(parts)


def suggest_code(code: str) -> str:
    """A fix for an unknown code: the nearest ones."""
    return suggest_names(code, CODES)
