"""The catalogue of everything onnxq says no to or warns of: a code that stays, a title, its meaning and the way out.

Q: errors, by area. R: refusals, asked for and denied. F: left float. W: warnings.

Where something is raised, refused or warned of, its code stands as text: `DataError(path, "is empty", code="Q203")`,
`Refusal(node, reason, fix, rule, code="R102")`, `LeftFloat(node, reason, rule, code="F103")`, `Caution("W104", text)`.
Without one, an error has the code of its class. A kind of fault that a person would look up by itself gets a new entry
here, and a function in tests/codes that provokes it.
"""

from __future__ import annotations

from onnxq.codes.base import Code
from onnxq.codes.calibration import CALIBRATION
from onnxq.codes.config import CONFIG
from onnxq.codes.data import DATA
from onnxq.codes.engines import DEPENDENCIES, VERIFICATION
from onnxq.codes.float import LEFT_FLOAT, REFUSALS
from onnxq.codes.model import MODEL
from onnxq.codes.output import OUTPUT, PROGRAM
from onnxq.codes.plan import PLAN
from onnxq.codes.warnings import WARNINGS
from onnxq.nearest import did_you_mean

AREAS: dict[str, tuple[Code, ...]] = {
    "Q0 The command line and the program": PROGRAM,
    "Q1 The model": MODEL,
    "Q2 Data": DATA,
    "Q3 Configuration, options and arguments": CONFIG,
    "Q4 Plans and the order of calls": PLAN,
    "Q5 Calibration": CALIBRATION,
    "Q6 Output": OUTPUT,
    "Q7 Verification": VERIFICATION,
    "Q8 Dependencies and compilers": DEPENDENCIES,
    "R Refused: asked for and denied": REFUSALS,
    "F Left float: int8 would not pay, or a rule says so": LEFT_FLOAT,
    "W Warnings": WARNINGS,
}
CODES: dict[str, Code] = {code.id: code for codes in AREAS.values() for code in codes}

__all__ = ["AREAS", "CODES", "Code", "catalogue_page", "suggest_code"]

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
    for area, codes in AREAS.items():
        head, _, title = area.partition(" ")
        parts.append(f"## {head}: {title}\n" if len(head) == 1 else f"## {head}xx: {title}\n")
        parts += [f"### {code.id}: {code.title}\n\n{code.meaning}\n\n**What to do:** {code.fix}\n" for code in codes]
    return "\n".join(parts)


def suggest_code(code: str) -> str:
    """A fix line with the codes that look like this one."""
    return did_you_mean(code, CODES)
