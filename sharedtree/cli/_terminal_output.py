"""Prints the text, JSON and errors of all commands.

Files are untrusted, and so are the texts in them. A terminal obeys some characters. So characters that are not
printable are written as escapes: a file cannot clear the screen, or make one line look like another.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable
from typing import Any, Literal, TextIO

from ..core._errors import SharedTreeError
from ..core._printing import printable, printable_lines
from ..show._tables import RICH_STYLES

OK, FOUND, TROUBLE = 0, 1, 2
"""Exit statuses.

`OK`: all is well. `FOUND`: there is damage, a refusal or a difference. `TROUBLE`: the command could not do its work.
"""

# The exit status that a shell reports for a program that wrote to a closed pipe.
_CLOSED_PIPE = 141

TerminalStyle = Literal["", "path", "dim", "tie", "head", "good", "bad"]

_RICH_STYLES = RICH_STYLES | {"good": "green", "bad": "red"}

StyledText = tuple[str, TerminalStyle]


def guarded(run: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """Returns a command that handles the errors of another command.

    Errors of files and of `sharedtree` become a message and the status `TROUBLE`. If the reader of its output has gone,
    as `head` does after ten lines, the command ends quietly. All other errors pass through, with their traceback.

    Args:
        run: takes the parsed arguments and returns the exit status.
    """

    def command(arguments: argparse.Namespace) -> int:
        """Runs the command, and returns its exit status or that of the error."""
        try:
            status = run(arguments)
            # A closed pipe is noticed here at the latest, and not when Python ends.
            sys.stdout.flush()
        except BrokenPipeError:
            # Text that is still buffered goes to the null device. Otherwise Python would print an error when it ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return _CLOSED_PIPE
        except (SharedTreeError, OSError) as error:
            write_error(message_of(error))
            return TROUBLE
        return status

    return command


def message_of(error: BaseException) -> str:
    """Returns the message for an error: of an operating system error, the file and the reason."""
    if isinstance(error, OSError) and not isinstance(error, SharedTreeError) and error.filename is not None:
        return f"{printable(str(error.filename))}: {error.strerror}"
    return str(error)


def write_json(value: Any) -> None:
    """Writes one JSON value to standard output."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def write_error(text: str) -> None:
    """Writes a message to standard error. Line breaks are kept, and other unprintable characters are escaped."""
    sys.stderr.write(_encodable(printable_lines(text), sys.stderr) + "\n")


def line_writer() -> Callable[..., None]:
    """Returns a function that writes one line to standard output.

    It takes any number of pairs of a text and a style. Styles have an effect on a terminal if `rich` is installed.
    """
    console = _console() if sys.stdout.isatty() else None
    if console is None:
        return _write_plain
    from rich.text import Text

    def write(*texts: StyledText) -> None:
        styled = [(_encodable(printable(text), sys.stdout), _RICH_STYLES.get(style, "")) for text, style in texts]
        line = Text.assemble(*styled)
        console.print(line, soft_wrap=True, highlight=False)

    return write


def terminal_width() -> int | None:
    """Returns the width of the terminal, or what COLUMNS says. None if standard output is no terminal."""
    if not sys.stdout.isatty() and "COLUMNS" not in os.environ:
        return None
    return shutil.get_terminal_size().columns


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun: `1 array`, `2 arrays`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _write_plain(*texts: StyledText) -> None:
    """Writes one line without styles."""
    sys.stdout.write(_encodable(printable("".join(text for text, _ in texts)), sys.stdout) + "\n")


def _console() -> Any:
    """Returns the console of `rich` for standard output. None if `rich` is not installed."""
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(file=sys.stdout)


def _encodable(text: str, stream: TextIO) -> str:
    """Returns a text that a stream can write: characters that its encoding lacks are escaped, and `×` becomes `x`."""
    # A stream that collects text in memory has no encoding.
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text.replace("×", "x")
    return text.encode(encoding, "backslashreplace").decode(encoding)
