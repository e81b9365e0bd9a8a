"""Options of the command line: those of the configuration, made from its fields, the few that commands share, and their
names in the place of parameters (`force=True`) in messages."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from onnxq.errors import find_nearest, suggest_names
from onnxq.sites import JsonObject

if TYPE_CHECKING:
    from onnxq.config import Option

# Arguments of public functions that messages name -> their options.
ARGUMENTS = {
    "config": "--config",
    "data": "--data",
    "force": "--force",
    "given": "--bits",
    "kind": "--format",
    "out": "--output",
    "record": "--from",
    "top": "--top",
    "verbose": "-v",
}
# `name=value` in backticks, as the library's messages write it.
_PARAMETER = re.compile(r"`(\w+)=([^`]*)`")


Parameters = list[click.Parameter]


class Parsed(click.ParamType):  # type: ignore[type-arg]
    """A value that `parse` reads. It raises ValueError, in words for people, for text that does not fit."""

    name = "value"

    def __init__(self, parse: Callable[[str], Any]) -> None:
        self.parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The value. Fails, naming the option, for one that does not fit."""
        try:
            return self.parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def define_option(
    names: str, text: str, *, parse: Callable[[str], Any] | None = None, **settings: Any
) -> click.Option:
    """An option by its flags, and the name of its parameter where it is another.

    text: for --help. parse: reads its value, as of `Parsed`.
    """
    settings |= {} if parse is None else {"type": Parsed(parse)}
    return click.Option(names.split(), help=text, **settings)


def make_options(command: str) -> Parameters:
    """The options of a `Command`, by its name, that are the configuration's. Not given they are None or ()."""
    # Here, since commands without them need no configuration.
    from onnxq.config import Command, list_options, parse_setting

    return [
        define_option(
            "--config",
            "A preset's name or a YAML file. [default: TARGET or TARGET-int8]",
            metavar="PRESET|FILE",
        ),
        define_option(
            "--set settings",
            "Set any key of the configuration, e.g. weights.bits=4; repeatable.",
            multiple=True,
            metavar="KEY=VALUE",
            parse=parse_setting,
        ),
        *map(_make_option, list_options(Command[command])),
    ]


# The options that people need first, by parameter.
_FIRST = frozenset(
    "data out force config settings target effort min_sqnr metric max_drop max_size max_latency report_out help".split()  # noqa: SIM905
)
# Sections of the configuration -> the titles of their options in --help. Those of single commands come first, too.
_TITLES = {
    "": "Quantization",
    "accuracy": "Accuracy",
    "data": "Samples",
    "verify": "Check",
    "runtime": "Engine",
    "scale": "Long runs and several machines",
    "output": "Files",
}
_OTHERS = "Output and help"


def group_options(params: Sequence[click.Parameter], command: str) -> dict[str, Parameters]:
    """The parameters by their titles in --help, those that people need first before all others.

    command: of `Command`, by its name.
    """
    from onnxq.config import Command, list_options

    sections = {
        option.name: option.path.rpartition(".")[0] for option in list_options(Command[command])
    }
    # All titles in their order; those without options are left out of the help.
    groups: dict[str, Parameters] = {title: [] for title in ("Options", *_TITLES.values(), _OTHERS)}
    for param in params:
        name = param.name
        title = _TITLES.get(sections[name], "Options") if name in sections else _OTHERS
        groups["Options" if name in _FIRST else title].append(param)
    return groups


class NamedOption(click.Option):
    """An option whose values are the names in a registry, which is loaded when they are asked for."""

    def __init__(self, flags: Sequence[str], option: Option, **settings: Any) -> None:
        super().__init__(flags, **settings, type=Parsed(self.parse_names))
        self.source = option

    @property
    def registered(self) -> dict[str, str]:
        """The device that each name builds for."""
        from onnxq.backends import list_registered

        return list_registered(self.source.names)

    def make_metavar(self, ctx: click.Context) -> str:
        """The names there are."""
        separate = self.source.field.default == ()
        return ",".join(self.registered) if separate else f"[{'|'.join(self.registered)}]"

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """With the devices that engines build for, behind the first sentence."""
        listed = ", ".join(f"{name} {place}" for name, place in self.registered.items() if place)
        flags, text = super().get_help_record(ctx) or ("", "")
        return flags, text.replace(".", f": {listed}.", 1) if listed else text

    def parse_names(self, text: str) -> Any:
        """The name or names. Raises ValueError for one that no engine has; targets are checked with what names them."""
        value = self.source.parse(text)
        known = list(self.registered)
        for name in (value,) if isinstance(value, str) else value:
            if name not in known and self.source.names != "backends":
                near = f"; {suggest_names(name, known)}" if find_nearest(name, known) else ""
                raise ValueError(f"{name!r} is not one of {', '.join(known)}{near}")
        return value


def _make_option(option: Option) -> click.Option:
    how: JsonObject = {"metavar": option.metavar, "type": Parsed(option.parse)}
    if option.field.annotation is bool:
        how = {"is_flag": True, "flag_value": not option.field.default}
    elif option.choices:
        how = {"type": click.Choice(option.choices)}
    elif option.repeatable:
        # Each value has as many words as its metavar.
        how = {"metavar": option.metavar, "multiple": True, "nargs": len(option.metavar.split())}
    elif option.bare:
        how |= {"is_flag": False, "flag_value": option.bare}
    elif option.is_whole:
        how["type"] = click.IntRange(*option.bounds)
    flags = [*option.flags, option.name]
    text = name_options(option.help)
    if option.field.default is True:
        # The flag turns off what its text, which parameters of functions share, says.
        text = f"Do not {text[0].lower()}{text[1:]}"
    if option.names:
        return NamedOption(flags, option, default=None, help=text)
    return click.Option(flags, default=None, help=text, **how)


def make_output(text: str, *flags: str, metavar: str = "OUT") -> click.Option:
    """The option for the file or folder that a command writes. text: for --help. flags: further ones."""
    return click.Option([*flags, "--output", "-o", "out"], metavar=metavar, help=text)


def name_beside(model: str, ending: str) -> Path:
    """The path of the model with another ending: `folder/name.onnx` -> `folder/name<ending>`."""
    # As text: a folder like `.`, which is refused later, has no name.
    return Path(str(Path(model)).removesuffix(".onnx") + ending)


DATA = define_option(
    "--data",
    "Samples: .npz, a folder of .npy, .npz or images, test_data_set_*, Polygraphy data, text, file.py:function.",
    metavar="DATA",
)
FORCE = define_option(
    "--force", "Overwrite existing outputs. The input is never overwritten.", is_flag=True
)
STRICT = define_option(
    "--strict", "Exit with 3 when something asked for was refused.", is_flag=True
)
JSON = define_option("--json as_json", "Print one JSON document on stdout.", is_flag=True)
VERBOSE = define_option("--verbose -v", "List every site and every refusal.", is_flag=True)
QUIET = define_option("--quiet -q", "Print only warnings and errors.", is_flag=True)
TOP = define_option(
    "--top",
    "Show no more than N rows of each list, the worst or first.",
    type=click.IntRange(min=1),
    metavar="N",
)


@cache
def list_flags() -> dict[str, str]:
    """The option for each parameter or override that messages name."""
    # Here, since most texts name none.
    from onnxq.config import list_options

    return {**{option.name: option.flags[0] for option in list_options()}, **ARGUMENTS}


def name_options(text: str) -> str:
    """The text with options in the place of parameters: `force=True` -> `--force`, `cpu='vnni'` -> `--cpu vnni`."""
    return _PARAMETER.sub(_name_option, text)


def _name_option(parameter: re.Match[str]) -> str:
    """The option and its value; the text itself for a name that is no parameter."""
    option = list_flags().get(parameter[1])
    value = parameter[2]
    if option is None:
        return parameter[0]
    # Flags have no value, and "…" stands for one that the user is to fill in. Paths of Windows are escaped.
    plain = value.strip("'").replace("\\\\", "\\")
    return f"`{option}`" if value in ("True", "…") else f"`{option} {plain}`"
