"""With respect to which leaves: the option `wrt` of `grad`, its family and `optimizer`, which is a filter.

What a filter is stands in `tree/_filters.py`.
"""

import typing
from collections.abc import Callable, Sequence
from typing import Any

from ..core._by_identity import IdentitySet
from ..core._errors import definition_of
from ..core._node_types import argument_and_filter
from ..core._printing import shown
from ..tree._asking_filters import code_that_selects, selection
from ..tree._filters import AnyFilter, Filter, FilterPrefix, Option, Place, how_to_select

OF_GRAD = Option("wrt", "sharedtree.grad(f, wrt=")
OF_OPTIMIZER = Option("wrt", "sharedtree.optimizer(tx, wrt=")


def select_everywhere(arguments: Sequence[Any], wrt: AnyFilter, leaves: Sequence[Any]) -> str:
    """The fix where a filter that asks for paths selects leaves at some of theirs only: it selects the others, too.

    Args:
        arguments: with their modules in them, for which the filter has answered.
        wrt: the filter.
        leaves: those in question.

    Returns:
        Lines of a message, empty if there is no such fix that could be written down.
    """
    wanted, selected = IdentitySet(leaves), IdentitySet()
    others: list[tuple[Any, tuple[Any, ...]]] = []

    if isinstance(wrt, FilterPrefix) or not wrt.asks_for_path:
        return ""

    def ask(place: Place) -> bool:
        answer = wrt.selects(place)
        if answer:
            selected.add(place.leaf)
        elif place.leaf in wanted:
            others.append((place.leaf, place.path))
        return answer

    for argument in arguments:
        selection(argument, Filter(ask, asks_for_path=True), "")
    # What is selected nowhere is to stay so.
    return code_that_selects(list(dict.fromkeys(path for leaf, path in others if leaf in selected)), wrt)


def require_nothing_left(
    arguments: Sequence[Any], can_be_differentiated: Callable[[Any], bool], wrt: Any, option: Option = OF_GRAD
) -> None:
    """Raises if there is a leaf that could be differentiated, in arguments of which a filter selects none.

    Args:
        arguments: with their modules in them.
        can_be_differentiated: whether a leaf can.
        wrt: the filter, as it was given.
        option: where.

    Raises:
        ValueError: which says what there is.
    """
    places: list[Place] = []

    def note(place: Place) -> bool:
        places.append(place)
        return True

    for argument in arguments:
        selection(argument, Filter(note), "")
    left = [place for place in places if can_be_differentiated(place.leaf)]
    if not left:
        return
    asked = [str(definition_of(function)) for function in _functions_in(wrt)]
    given = f"`wrt`, which asks {' and '.join(asked)}," if asked else f"`wrt={shown(wrt)}`"
    raise ValueError(f"{given} selects nothing that can be differentiated. {how_to_select(left, wrt, option)}")


def _functions_in(wrt: Any) -> list[Any]:
    if isinstance(wrt, (list, tuple)):
        return [function for each in wrt for function in _functions_in(each)]
    return [wrt] if callable(wrt) and not isinstance(typing.get_origin(wrt) or wrt, type) else []


def require_no_prefix_filter(argnums: Any) -> None:
    """Raises if `argnums` is what a library has for a filter of one argument.

    Raises:
        TypeError: with `argnums` and `wrt` for the same.
    """
    found = argument_and_filter(argnums)
    if found is not None:
        argument, code = found
        raise TypeError(
            f"`argnums` is one position or several, not {shown(argnums)}. A filter is an option of its own:\n"
            f"    sharedtree.grad(f, argnums={argument!r}, wrt={code})"
        )
