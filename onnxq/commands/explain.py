"""`onnxq explain`: the meaning of a code. It loads nothing of the engine."""

from dataclasses import asdict

from onnxq.codes import AREAS, CODES, suggest_code
from onnxq.errors import dump_json


def explain_code(code: str | None, *, as_json: bool) -> str:
    """The text on a code, or its JSON; on all codes for None. Raises ValueError for an unknown one."""
    if code is None:
        areas = (
            [area.title, *(f"  {code.id}  {code.title}" for code in area.codes)] for area in AREAS
        )
        return _write_json(*CODES) if as_json else "\n\n".join(map("\n".join, areas))
    name = code.strip().upper()
    entry = CODES.get(name)
    if entry is None:
        raise ValueError(f"there is no code {code!r}; {suggest_code(name)}")
    if as_json:
        return _write_json(entry.id)
    return f"{entry.id}: {entry.title}\n\n{entry.meaning}\n\nWhat to do: {entry.fix}"


def _write_json(*codes: str) -> str:
    return dump_json({"schema": 1, "codes": [asdict(CODES[code]) for code in codes]})
