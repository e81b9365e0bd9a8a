"""onnxq explain."""

from __future__ import annotations

import click

from onnxq.codes import AREAS, CODES, Area, Code, suggest_code


@click.command("explain", short_help="Say what a code such as Q303 means, and what to do.")
@click.argument("code", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
def command(code: str | None, as_json: bool) -> None:
    """Say what CODE means, the code of an error, a refusal or a warning, and what to do; without it, list all codes.

    \b
    Example:
      onnxq explain Q303
    """
    if code is not None:
        found = CODES.get(code.strip().upper())
        if found is None:
            raise click.BadParameter(f"there is no code {code!r}; {suggest_code(code.strip().upper())}")
        click.echo(_json([found]) if as_json else _text(found))
    elif as_json:
        click.echo(_json(list(CODES.values())))
    else:
        click.echo("\n\n".join(_list_codes(area) for area in AREAS))


def _text(code: Code) -> str:
    return f"{code.id}: {code.title}\n\n{code.meaning}\n\nWhat to do: {code.fix}"


def _list_codes(area: Area) -> str:
    return "\n".join([area.title, *(f"  {code.id}  {code.title}" for code in area.codes)])


def _json(codes: list[Code]) -> str:
    import json
    from dataclasses import asdict

    return json.dumps({"schema": 1, "codes": [asdict(code) for code in codes]}, indent=1)
