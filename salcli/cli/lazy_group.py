"""A group that builds a command when it is called. Building all of them took longer than most of what they do."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command, get_command_name, get_group

from salcli.cli.help_text import in_markup

if TYPE_CHECKING:
    from click import Command, Context
    from typer.models import CommandInfo, TyperInfo

MARKUP = "rich"  # what help texts are written in; Typer would need more time to read Markdown


class LazyGroup(TyperGroup):
    """Knows the names and first lines of the commands of `later`; the rest of a command is made when it is called."""

    later: dict[str, CommandInfo | TyperInfo]

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.help = in_markup(self.help)
        self.commands = {**self.commands, **{name: _outline(name, info) for name, info in self.later.items()}}

    def resolve_command(self, ctx: Context, args: list[str]) -> Any:  # type: ignore[override]
        """The command that is called."""
        name, command, rest = super().resolve_command(ctx, args)  # type: ignore[arg-type]
        return name, self.whole(name) if name in self.later else command, rest

    def whole(self, name: str) -> Command:
        """A command with its parameters."""
        return _built(name, self.later[name])


def build_later(app: typer.Typer) -> None:
    """Take the commands out of Typer's hands, which would build all of them, and give them to the app's lazy group."""
    group: type[LazyGroup] = app.info.cls  # type: ignore[assignment]
    commands = {_name(info): info for info in app.registered_commands}
    group.later = {**commands, **{str(info.name): info for info in app.registered_groups}}
    app.registered_commands, app.registered_groups = [], []


def _name(info: CommandInfo) -> str:
    assert info.callback is not None
    return info.name or get_command_name(info.callback.__name__)


def _outline(name: str, info: CommandInfo | TyperInfo) -> TyperCommand:
    """What the list of all commands shows of one."""
    group = getattr(info, "typer_instance", None)
    first, *_ = inspect.cleandoc(group.info.help if group else info.callback.__doc__).split("\n\n")
    hidden = info.hidden if isinstance(info.hidden, bool) else False
    return TyperCommand(name, help=in_markup(first), hidden=hidden, rich_help_panel=info.rich_help_panel)


def _built(name: str, info: CommandInfo | TyperInfo) -> Any:
    """As Typer does it, with help texts in its markup."""
    group = getattr(info, "typer_instance", None)
    if group:
        command: Any = get_group(group)
    else:
        alone = typer.Typer(add_completion=False, rich_markup_mode=MARKUP)
        alone.registered_commands.append(info)
        command = get_command(alone)
    command.name = name
    for each in (command, *getattr(command, "commands", {}).values()):
        for described in (each, *each.params):
            described.help = in_markup(described.help)
    return command
