"""A command group that imports its commands late, and the boundary where errors become exit codes."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import click

from onnxq.errors import OnnxqError
from onnxq.nearest import did_you_mean

DONE, USER, USAGE, REFUSED, UNMET, DEFECT, STOPPED = 0, 1, 2, 3, 4, 70, 130


class LazyGroup(click.Group):
    """Commands by the module that defines `command`; imported one by one, when needed."""

    def __init__(self, *args: Any, modules: Mapping[str, str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._modules = dict(modules)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order in which a newcomer meets them."""
        return list(self._modules)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the module of one command; None for an unknown name."""
        if cmd_name not in self._modules:
            return None
        command: click.Command = import_module(self._modules[cmd_name]).command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click's, with the nearest names for an unknown command."""
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            ctx.fail(f"no command {name!r}; {did_you_mean(name, self._modules)}")
        return super().resolve_command(ctx, args)

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, *_: Any, **extra: Any) -> Any:
        """Run and exit with a documented code; the only place where an exception ends."""
        extra.pop("standalone_mode", None)
        try:
            result = super().main(args, prog_name, standalone_mode=False, **extra)
            code = result if isinstance(result, int) else DONE
        except click.ClickException as error:
            error.show()
            code = USAGE
        except (click.Abort, KeyboardInterrupt):
            _say("stopped; nothing half-written is left")
            code = STOPPED
        except OnnxqError as error:
            _say(f"error: {error}")
            code = USER
        except BrokenPipeError:
            # The reader of a pipe has gone (`onnxq inspect … | head`); silence Python's own complaint at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = DONE
        except MemoryError:
            _say("error: memory: not enough of it\n  fix: lower --batch, or bound it with --memory-limit")
            code = USER
        except Exception:
            traceback.print_exc()
            _say("this is a defect of onnxq, not yours; please report it with the text above and the model if you can")
            code = DEFECT
        sys.exit(code)


def _say(text: str) -> None:
    click.echo(text, err=True)
