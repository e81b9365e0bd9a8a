"""Parameters that messages of the library name (`force=True`), written as options (`--force`)."""

from __future__ import annotations

import re

# Parameter of a public function that messages name -> the option for it.
OPTIONS = {
    "allow_missing": "--allow-missing",
    "batch": "--batch",
    "budget": "--budget",
    "cpu": "--cpu",
    "data": "--data",
    "engine": "--engine",
    "engines": "--engines",
    "forbid": "--forbid",
    "force": "--force",
    "given": "--bits",
    "load": "--load",
    "max_drop": "--max-drop",
    "memory_limit": "--memory-limit",
    "metric": "--metric",
    "min_sqnr": "--min-sqnr",
    "new_weights": "--new-weights",
    "out": "--output",
    "overwrite": "--force",
    "placement": "--placement",
    "plan_out": "--plan",
    "plugin": "--plugin",
    "promote_to": "--promote-to",
    "provider": "--provider",
    "reduce": "--reduce",
    "require": "--require",
    "require_exact": "--require-exact",
    "require_int8": "--require-int8",
    "samples": "--samples",
    "save": "--save",
    "shapes": "--shapes",
    "target": "--target",
    "top": "--top",
    "verbose": "-v",
}
# `name=value` in backticks, as the library's messages write it.
_PARAMETER = re.compile(r"`(\w+)=([^`]*)`")


def name_options(text: str) -> str:
    """The text with options in the place of parameters: `force=True` -> `--force`, `cpu='vnni'` -> `--cpu vnni`."""
    return _PARAMETER.sub(_name_option, text)


def _name_option(found: re.Match[str]) -> str:
    """The option and its value; the text itself for a name that is no parameter."""
    option, value = OPTIONS.get(found[1]), found[2]
    if option is None:
        return found[0]
    # Flags have no value, and "…" stands for one that the user is to fill in.
    return f"`{option}`" if value in ("True", "…") else f"`{option} {value.strip(chr(39))}`"
