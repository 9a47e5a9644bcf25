"""What every command prints goes through here: text, JSON, and errors.

Files are untrusted, and so are the texts in them. A terminal obeys some characters, so what is not printable is written
as an escape: a file cannot clear the screen, nor make a line look like another.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from typing import Any, Literal, TextIO

from ..core._errors import SharedTreeError
from ..core._printing import printable, printable_lines
from ..show._tables import RICH_STYLES

OK, FOUND, TROUBLE = 0, 1, 2
"""Exit statuses: all is well; what a command looks for is there (damage, a refusal, a difference); it could not run."""

_CLOSED_PIPE = 141  # what a shell reports of a program that wrote to a closed pipe

Style = Literal["", "path", "dim", "tie", "head", "good", "bad"]

_RICH_STYLES = RICH_STYLES | {"good": "green", "bad": "red"}

Part = tuple[str, Style]


def guarded(run: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """A command that prints errors of files and of the library as a message, and is quiet if its reader leaves."""

    def command(arguments: argparse.Namespace) -> int:
        try:
            status = run(arguments)
            sys.stdout.flush()
        except BrokenPipeError:
            # What is still buffered goes nowhere, or Python would complain when it ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return _CLOSED_PIPE
        except (SharedTreeError, OSError) as error:
            write_error(message_of(error))
            return TROUBLE
        return status

    return command


def message_of(error: BaseException) -> str:
    """What to tell about an error."""
    if isinstance(error, OSError) and not isinstance(error, SharedTreeError) and error.filename is not None:
        return f"{printable(str(error.filename))}: {error.strerror}"
    return str(error)


def write_json(value: Any) -> None:
    """Writes one JSON value."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def write_error(text: str) -> None:
    """Writes a message to standard error. Its lines stay lines."""
    sys.stderr.write(_encodable(printable_lines(text), sys.stderr) + "\n")


def line_writer() -> Callable[..., None]:
    """A function that writes a line, as texts with styles, which show on a terminal if `rich` is there."""
    console = _console() if sys.stdout.isatty() else None
    if console is None:
        return _write_plain
    from rich.text import Text

    def write(*parts: Part) -> None:
        line = Text.assemble(
            *[(_encodable(printable(text), sys.stdout), _RICH_STYLES.get(style, "")) for text, style in parts]
        )
        console.print(line, soft_wrap=True, highlight=False)

    return write


def counted(number: int, noun: str) -> str:
    """A number with its noun: `1 array`, `2 arrays`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _write_plain(*parts: Part) -> None:
    sys.stdout.write(_encodable(printable("".join(text for text, _ in parts)), sys.stdout) + "\n")


def _console() -> Any:
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(file=sys.stdout)


def _encodable(text: str, stream: TextIO) -> str:
    """A text with escapes for what the stream's encoding lacks."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text.replace("×", "x")
    return text.encode(encoding, "backslashreplace").decode(encoding)
