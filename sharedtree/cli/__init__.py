"""Command line: the commands that look at files, and the demo of `sharedtree demo`.

The commands take paths of files, which may come from anyone. They print text for people or, with `--json`, one JSON
object. The file of each command lists the keys of its JSON. Keys are never removed, but new ones may be added. Each
command returns an exit status.

Only `audit --trusted` looks up names that a file contains. No command prints a character that a terminal obeys.
"""

from typing import Any

from . import _show_and_draw, _verify_and_audit
from ._terminal_output import TROUBLE as TROUBLE, guarded as guarded, write_error as write_error


def add_to(commands: Any) -> None:
    """Adds the commands to `commands`, the subparsers of an argument parser."""
    for command in (_show_and_draw, _verify_and_audit):
        command.add_to(commands)
