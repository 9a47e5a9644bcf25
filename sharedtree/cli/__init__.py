"""The commands that look at files: `show`, `draw`, `verify`, `audit` and `diff`.

Each is a file that adds its options and runs it. With `--json` each but `draw` prints one JSON object, whose keys its
file lists; they stay as they are, and new ones may be added. Nothing that a file names is looked up, but by `audit
--trusted`.
"""

from typing import Any

from . import _audit, _diff_command, _draw, _show_and_draw, _verify_and_audit
from ._terminal_output import guarded as guarded


def add_to(commands: Any) -> None:
    """Adds the commands to the subparsers of a parser."""
    for command in (_show_and_draw, _draw, _verify_and_audit, _audit, _diff_command):
        command.add_to(commands)
