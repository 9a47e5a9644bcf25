"""JSON as the format has it: no key twice, no half of a surrogate pair, no `-0`, and no deeper than Python can read."""

import json
import re
from typing import Any

from ..._errors import FormatError
from ..._printable import printable


def malformed(what: str) -> FormatError:
    """The error for a manifest that is not what it should be."""
    return FormatError(f"The manifest of the file is malformed: {what}. The file is damaged, or was made by hand.")


def parse_manifest_json(text: str) -> Any:
    """The value of the JSON text of a manifest.

    Raises:
        FormatError: if it is not JSON as the format has it.
    """
    try:
        return parse_json(text, parse_float=_refuse, parse_constant=_refuse)
    except ValueError as error:
        raise malformed(str(error)) from None


def parse_json(text: str, **hooks: Any) -> Any:
    """The value of a JSON text.

    Args:
        text: the text.
        **hooks: of `json.loads`.

    Raises:
        ValueError: if it is not JSON, is nested too deeply, has one key twice, the number `-0`, or a text that UTF-8
            cannot hold. Says what, printably.

    Cost: one pass over the text; a few more where it has escapes of surrogates.
    """
    hooks = {"parse_constant": _not_json, **hooks}
    if _ZERO.search(text):
        hooks["parse_int"] = _whole
    try:
        value = json.loads(text, object_pairs_hook=_object, **hooks)
        # Writing it out again finds the halves of pairs without a walk in Python.
        if _SURROGATE.search(text) and not is_unicode(json.dumps(value, ensure_ascii=False)):
            raise _RefusedError("it holds half of a surrogate pair in a text")
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except _RefusedError:
        raise
    except ValueError as error:  # a syntax error, or a number with more digits than Python reads
        raise ValueError(f"it is not JSON ({printable(str(error)[:100])})") from None
    return value


def is_unicode(text: str) -> bool:
    """Whether a text can be written as UTF-8: it has no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class _RefusedError(ValueError):
    """What JSON allows and the format does not."""


# Python reads it as 0. All other numbers with a sign are found where they are used: no place may have one.
_ZERO = re.compile(r"-0(?![0-9.eE])")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]")  # escaped or bare; a pair is not told from a half


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen = set[str]()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise _RefusedError(f"the key '{printable(twice[:80])}' is there twice")
    return result


def _refuse(number: str) -> Any:
    raise _RefusedError(f"it holds the number `{number[:40]}`, and all its numbers are whole")


def _not_json(constant: str) -> Any:
    raise _RefusedError(f"{constant} is not JSON")


def _whole(number: str) -> int:
    if number == "-0":
        raise _RefusedError("it holds the number `-0`, and none of its numbers has a sign")
    return int(number)
