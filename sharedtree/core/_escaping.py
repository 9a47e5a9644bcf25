r"""Texts of others, as people get to see them: what a terminal would obey, or what cannot be seen, is an escape.

Names of tensors, keys, fields and classes and what is saved beside a tree may come from a file that anyone has made.
They reach error messages, reports and the command line, and from there a terminal or a log. There a control character
could clear the screen, a newline could begin a line that looks like one of ours, and a character that turns the
direction of writing could make a text look like another.

A message has lines of its own, so newlines cannot be escaped once it is put together. Each text of others is therefore
made `printable` where it enters a message. `SharedTreeError` makes `printable_lines` of every message besides: whatever
was forgotten can do no more than break a line.
"""

import re

# What `str.isprintable` lets pass, although nothing is seen of it: Unicode's default ignorable characters. Those of the
# category Cf are not printable to Python either.
_INVISIBLE = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]")


def printable(text: str) -> str:
    r"""A text on one line, in which what is not printable is an escape.

    Args:
        text: any text, lone surrogates included.

    Returns:
        The text itself if there is nothing to escape. A backslash is no escape, so the text cannot be told from one
        that has the escape in it.

    Cost: one look at each character.

    Example:
        >>> print(printable("a\x1b[2Jb\nc"))
        a\x1b[2Jb\nc
    """
    if text.isprintable() and (text.isascii() or not _INVISIBLE.search(text)):
        return text
    return "".join(map(_escaped, text))


def printable_lines(text: str) -> str:
    r"""The same for a text that has lines of its own, which stay lines.

    Example:
        >>> print(printable_lines("one\r\ntwo\x07"))
        one\r
        two\x07
    """
    return "\n".join(map(printable, text.split("\n")))


def _escaped(char: str) -> str:
    if char.isprintable() and not _INVISIBLE.match(char):
        return char
    return ascii(char)[1:-1]
