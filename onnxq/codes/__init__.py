"""Catalogue of errors, refusals and warnings: a stable code, a title, the meaning and the remedy of each.

Q: errors, by area. R: refused requests. F: nodes left float. W: warnings.

The code stands as text where an error, a refusal or a warning is made: `DataError(path, "is empty", code="Q203")`,
`Refusal(node, reason, fix, rule, code="R102")`, `LeftFloat(node, reason, rule, code="F103")`, `Caution("W104", text)`.
Without one, an error has the code of its class. A fault that a person would look up by itself gets an entry here and a
function in tests/codes that provokes it.
"""

from __future__ import annotations

from onnxq.codes.base import Area, Code
from onnxq.codes.calibration import CALIBRATION
from onnxq.codes.config import CONFIG
from onnxq.codes.data import DATA
from onnxq.codes.engines import DEPENDENCIES, VERIFICATION, WORKERS
from onnxq.codes.float import LEFT_FLOAT, REFUSALS
from onnxq.codes.model import MODEL
from onnxq.codes.output import OUTPUT, PROGRAM
from onnxq.codes.plan import PLAN
from onnxq.codes.warnings import WARNINGS
from onnxq.nearest import suggest_names

# In the order of the page and of `onnxq explain`.
AREAS: tuple[Area, ...] = (
    Area("Q0xx", "The command line and the program", PROGRAM),
    Area("Q1xx", "The model", MODEL),
    Area("Q2xx", "Data", DATA),
    Area("Q3xx", "Configuration, options and arguments", CONFIG),
    Area("Q4xx", "Plans and the order of calls", PLAN),
    Area("Q5xx", "Calibration", CALIBRATION),
    Area("Q6xx", "Output", OUTPUT),
    Area("Q7xx", "Verification", VERIFICATION),
    Area("Q8xx", "Dependencies and compilers", DEPENDENCIES),
    Area("Q9xx", "Workers", WORKERS),
    Area("R", "Refused: asked for and denied", REFUSALS),
    Area("F", "Left float: int8 would not pay, or a rule says so", LEFT_FLOAT),
    Area("W", "Warnings", WARNINGS),
)
CODES: dict[str, Code] = {code.id: code for area in AREAS for code in area.codes}

__all__ = ["AREAS", "CODES", "Area", "Code", "catalogue_page", "suggest_code"]

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
            parts.append(f"### {code.id}: {code.title}\n\n{code.meaning}\n\n**What to do:** {code.fix}\n")
    return "\n".join(parts)


def suggest_code(code: str) -> str:
    """A fix for an unknown code: the nearest ones."""
    return suggest_names(code, CODES)
