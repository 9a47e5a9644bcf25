"""JSON as a manifest has it: whole numbers only, no key twice, no deeper than Python can read."""

import json
from typing import Any

from .._errors import FormatError


def malformed(what: str) -> FormatError:
    """The error for a manifest that is not what it should be."""
    return FormatError(f"The manifest of the file is malformed: {what}. The file is damaged, or was made by hand.")


def parse_json(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        FormatError: if it is not JSON, is nested too deeply, has one key twice, or a number that is not whole.
    """
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_refuse, parse_float=_refuse)
    except RecursionError:
        raise malformed("it is nested too deeply") from None
    except FormatError:
        raise
    except ValueError as error:  # a syntax error, or a number with more digits than Python reads
        raise malformed(f"it is not JSON ({str(error)[:100]})") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise malformed("an object has one key twice")
    return result


def _refuse(number: str) -> Any:
    raise malformed(f"it holds the number `{number[:40]}`, and all its numbers are whole")
