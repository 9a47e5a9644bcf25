"""The option `wrt` of `grad`, its family and `optimizer`: a filter for the leaves that are differentiated or optimised.

Filters are described in `tree/_filters.py`.
"""

import contextlib
import typing
from collections.abc import Callable, Sequence
from typing import Any

from ..core._by_identity import IdentitySet, WeakIdentityDict
from ..core._errors import definition_of
from ..core._node_types import argument_and_filter
from ..core._printing import shown
from ..tree._asking_filters import code_that_selects, selection
from ..tree._filters import AnyFilter, Filter, FilterPrefix, LeafPlace, Option, how_to_select

OF_GRAD = Option("wrt", "sharedtree.grad(f, wrt=")
OF_OPTIMIZER = Option("wrt", "sharedtree.optimizer(tx, wrt=")


def select_everywhere(arguments: Sequence[Any], wrt: AnyFilter, leaves: Sequence[Any]) -> str:
    """Returns the fix for tied leaves that a filter selects at some of their paths only: a filter for all their paths.

    Args:
        arguments: arguments of the call, with their modules.
        wrt: the filter.
        leaves: the tied leaves.

    Returns:
        Lines of a message. Empty if the filter does not ask for paths, or the fix cannot be written as code.
    """
    tied, selected = IdentitySet(leaves), IdentitySet()
    # Pairs of a tied leaf and a path at which the filter does not select it.
    omitted: list[tuple[Any, tuple[Any, ...]]] = []

    if isinstance(wrt, FilterPrefix) or not wrt.asks_for_path:
        return ""

    def ask(place: LeafPlace) -> bool:
        """Asks the user's filter, and records its answer."""
        answer = wrt.selects(place)
        if answer:
            selected.add(place.leaf)
        elif place.leaf in tied:
            omitted.append((place.leaf, place.path))
        return answer

    # `selection` asks the filter about every leaf at every path. Its result is of no interest here.
    for argument in arguments:
        selection(argument, Filter(ask, asks_for_path=True), name="")
    # A leaf that is selected at none of its paths is consistent, and needs no fix.
    return code_that_selects(list(dict.fromkeys(path for leaf, path in omitted if leaf in selected)), wrt)


def require_nothing_left(
    arguments: Sequence[Any], can_be_differentiated: Callable[[Any], bool], wrt: Any, option: Option = OF_GRAD
) -> None:
    """Raises an error after a filter selected no leaf, unless there was nothing left for a filter to select.

    Args:
        arguments: arguments of the call, with their modules. The filter has selected none of their leaves.
        can_be_differentiated: returns True for a leaf that a filter could select.
        wrt: the filter, as the user wrote it.
        option: the option with the filter, for the message.

    Raises:
        ValueError: names the leaves to choose from.
    """
    # Collect all leaves, by a filter that selects everything.
    places: list[LeafPlace] = []

    def collect(place: LeafPlace) -> bool:
        places.append(place)
        return True

    for argument in arguments:
        selection(argument, Filter(collect), name="")
    candidates = [place for place in places if can_be_differentiated(place.leaf)]
    if not candidates:
        return
    # A function has no useful `repr`, so the message says where it is defined.
    functions = [str(definition_of(function)) for function in _functions_in(wrt)]
    subject = f"`wrt`, which asks {' and '.join(functions)}," if functions else f"`wrt={shown(wrt)}`"
    raise ValueError(f"{subject} selects nothing that can be differentiated. {how_to_select(candidates, wrt, option)}")


def _functions_in(wrt: Any) -> list[Any]:
    """Returns the functions among the parts of a filter. Classes do not count, although they are callable."""
    if isinstance(wrt, (list, tuple)):
        return [function for part in wrt for function in _functions_in(part)]
    return [wrt] if callable(wrt) and not isinstance(typing.get_origin(wrt) or wrt, type) else []


def settle(wrt: Any) -> None:
    """Notes that no warning is to say where Flax NNX would ask this filter.

    Either there was a warning, or `sharedtree.optimizer` has the filter. Then it trains what `sharedtree.grad` with the
    same filter differentiates, and no optimizer of NNX asks.

    Args:
        wrt: the filter, as the user wrote it. Its functions are noted.
    """
    for function in _functions_in(wrt):
        # Functions written in C need not allow a weak reference.
        with contextlib.suppress(TypeError):
            _settled_functions[function] = True


def is_settled(wrt: Any) -> bool:
    """Returns True if `settle` has noted all functions of a filter."""
    return all(_settled_functions.get(function) for function in _functions_in(wrt))


_settled_functions: WeakIdentityDict[bool] = WeakIdentityDict()
"""Functions of filters, each mapped to True. See `settle`."""


def require_no_prefix_filter(argnums: Any) -> None:
    """Raises if `argnums` is a library's object for one argument and a filter, such as `nnx.DiffState`.

    Raises:
        TypeError: with a call that has the argument in `argnums` and the filter in `wrt`.
    """
    # The position of the argument, and the filter as code. None for other objects.
    argument_filter = argument_and_filter(argnums)
    if argument_filter is not None:
        argument, code = argument_filter
        raise TypeError(
            f"`argnums` takes one position or several, not {shown(argnums)}. Pass a filter as `wrt`:\n"
            f"    sharedtree.grad(f, argnums={argument!r}, wrt={code})"
        )
