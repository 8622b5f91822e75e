"""The help of the commands: every option and argument says what it is for."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from lockstep.jobs.cli.main import app
from lockstep.training import __main__ as programs
from lockstep.training import cli
from lockstep.training.exercises import bench

COMMANDS = [name for name in cli.COMMANDS if name not in programs._APART]


class Built(Exception):
    """Ends a command as soon as its parser is complete."""


def _apart(monkeypatch: pytest.MonkeyPatch) -> Iterator[argparse.ArgumentParser]:
    """The parsers of the commands that read their own words."""

    def stop(parser: argparse.ArgumentParser, *_: Any) -> None:
        raise Built(parser)

    monkeypatch.setattr(cli.Parser, "parse_args", stop)
    for module in (*programs._APART.values(), *(f"exercises.bench.{part}" for part in bench._PARTS)):
        with pytest.raises(Built) as caught:
            importlib.import_module(f"lockstep.training.{module}").main([])
        yield caught.value.args[0]


def test_every_option_of_the_commands_inside_has_a_help_text(monkeypatch: pytest.MonkeyPatch) -> None:
    subparsers = programs._parser()._subparsers
    assert subparsers is not None
    choices: Any = subparsers._group_actions[0].choices
    parsers = [*(choices[name] for name in COMMANDS), *_apart(monkeypatch)]
    actions = [(parser.prog, action) for parser in parsers for action in parser._actions]
    assert len(parsers) > 12 and len(actions) > 60
    bare = [(prog, action.option_strings or action.dest) for prog, action in actions if not action.help]
    assert not bare, "give each a help="


def test_every_option_of_lockstep_has_a_help_text() -> None:
    group: Any = typer.main.get_command(app)
    commands = {"lockstep": group, **group.commands}
    found = [(name, one) for name, command in commands.items() for one in command.params]
    assert len(found) > 60
    assert [(name, one.name) for name, one in found if not one.help] == [], "give each a help="
