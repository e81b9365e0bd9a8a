"""`onnxq explain`: the meaning of a code."""

from __future__ import annotations

from dataclasses import asdict

import click

from onnxq.codes import AREAS, CODES, Area, Code, suggest_code
from onnxq.escapes import dump_json


@click.command("explain")
@click.argument("code", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
def run_command(code: str | None, as_json: bool) -> None:
    """Explain CODE, of an error, a refusal or a warning, and its fix; without it, list all codes.

    \b
    Example:
      onnxq explain Q303
    """
    if code is not None:
        found = CODES.get(code.strip().upper())
        if found is None:
            raise click.BadParameter(f"there is no code {code!r}; {suggest_code(code.strip().upper())}")
        click.echo(_write_json([found]) if as_json else _explain_code(found))
    elif as_json:
        click.echo(_write_json(list(CODES.values())))
    else:
        click.echo("\n\n".join(_list_codes(area) for area in AREAS))


def _explain_code(code: Code) -> str:
    return f"{code.id}: {code.title}\n\n{code.meaning}\n\nWhat to do: {code.fix}"


def _list_codes(area: Area) -> str:
    return "\n".join([area.title, *(f"  {code.id}  {code.title}" for code in area.codes)])


def _write_json(codes: list[Code]) -> str:
    return dump_json({"schema": 1, "codes": [asdict(code) for code in codes]})
