"""Parameters that messages of the library name (`force=True`), written as options (`--force`)."""

from __future__ import annotations

import re
from functools import cache

# Arguments of public functions that messages name -> their options.
ARGUMENTS = {
    "data": "--data",
    "force": "--force",
    "given": "--bits",
    "out": "--output",
    "overwrite": "--force",
    "top": "--top",
    "verbose": "-v",
}
# `name=value` in backticks, as the library's messages write it.
_PARAMETER = re.compile(r"`(\w+)=([^`]*)`")


@cache
def list_flags() -> dict[str, str]:
    """The option for each parameter or override that messages name."""
    # Here, since most texts name none.
    from onnxq.config import list_options

    return {**{option.name: option.flags[0] for option in list_options()}, **ARGUMENTS}


def name_options(text: str) -> str:
    """The text with options in the place of parameters: `force=True` -> `--force`, `cpu='vnni'` -> `--cpu vnni`."""
    return _PARAMETER.sub(_name_option, text)


def _name_option(found: re.Match[str]) -> str:
    """The option and its value; the text itself for a name that is no parameter."""
    option, value = list_flags().get(found[1]), found[2]
    if option is None:
        return found[0]
    # Flags have no value, and "…" stands for one that the user is to fill in.
    return f"`{option}`" if value in ("True", "…") else f"`{option} {value.strip(chr(39))}`"
