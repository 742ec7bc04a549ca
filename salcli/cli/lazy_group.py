"""A group that builds a command when it is called. Building all of them took longer than most of what they do."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Literal

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command, get_command_name, get_group
from typer.models import TyperInfo

from salcli.cli.help_text import in_markup

if TYPE_CHECKING:
    from click import Context
    from typer.models import CommandInfo

MARKUP: Literal["rich"] = "rich"  # what help texts are written in; Typer would need more time to read Markdown


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

    def whole(self, name: str) -> Any:
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
    group = info.typer_instance if isinstance(info, TyperInfo) else None
    text = group.info.help if group else getattr(info.callback, "__doc__", "")
    first, *_ = inspect.cleandoc(str(text)).split("\n\n")
    hidden = info.hidden is True  # Typer has a placeholder where nothing is said
    return TyperCommand(name, help=in_markup(first), hidden=hidden, rich_help_panel=info.rich_help_panel)


def _built(name: str, info: CommandInfo | TyperInfo) -> Any:
    """As Typer does it, with help texts in its markup."""
    if isinstance(info, TyperInfo):
        assert info.typer_instance is not None
        command: Any = get_group(info.typer_instance)
    else:
        alone = typer.Typer(add_completion=False, rich_markup_mode=MARKUP)
        alone.registered_commands.append(info)
        command = get_command(alone)
    command.name = name
    for each in (command, *getattr(command, "commands", {}).values()):
        for described in (each, *each.params):
            described.help = in_markup(described.help)
    return command
