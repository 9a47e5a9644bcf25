"""The command line: the commands that look at files, and the demo of `sharedtree demo`.

In come the parser of `__main__` and paths of files, which may be anyone's; out go text for people or, with `--json`,
one JSON object, whose keys the command's file lists: they stay, and new ones may be added; and an exit status. Never
looks up a name of a file, but by `audit --trusted`, nor prints a character that a terminal obeys.
"""

from typing import Any

from . import _show_and_draw, _verify_and_audit
from ._terminal_output import TROUBLE as TROUBLE, guarded as guarded, write_error as write_error


def add_to(commands: Any) -> None:
    """Adds the commands to the subparsers of a parser."""
    for command in (_show_and_draw, _verify_and_audit):
        command.add_to(commands)
