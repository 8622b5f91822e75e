"""Programs for people that look at a run or at a machine. None runs in a rank. Only `doctor` and `export` need torch."""

from __future__ import annotations

if __name__ != "lockstep.tools":  # else each class would exist twice
    raise ImportError(f"the package {__name__} is imported as lockstep.tools")

from lockstep.training.cli import Parser

COMMANDS = {
    "top": "show the ranks of a run live: their steps, where the time goes, and which rank slows the others down",
    "report": "show one or several runs as one HTML file",
    "goodput": "show where the time of one or several runs went, over all attempts",
    "export": "write a run's weights as a plain file",
    "fetch": "download a run from a bucket into a new directory",
    "settings": "list every setting with its meaning and default, or a recipe's",
}
"""Commands of `lockstep`, each with a line of help: the module of that name has `main(argv)`."""
RUN = "a run directory"


def parser(name: str) -> Parser:
    """Returns the parser of the command's arguments."""
    return Parser(prog=f"lockstep {name}", description=f"{COMMANDS[name][0].upper()}{COMMANDS[name][1:]}.")
