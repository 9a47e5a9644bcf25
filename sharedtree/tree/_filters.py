"""Which leaves of a tree: the filters of `tree.filter`, `tree.partition`, `optimizer` and the option `wrt` of `grad`.

A filter is one of these, in the terms of Flax NNX and of Equinox:

    nnx.Param, eqx.nn.Linear            a class: of the value, or of the module that holds the leaf
    lambda path, value: ...             a function of a path and the value there
    eqx.is_inexact_array                a function of the leaf
    "tag"                               the tag of a variable of NNX
    ..., True, False                    all, or nothing
    (nnx.Param, "tag")                  several of these, of which one must select
    Net(embed=True, head=nnx.Param)     a tree prefix of filters, as those of booleans in Equinox

A filter is asked about the *value* at a path: the variable of NNX that holds the leaf, or the leaf itself where none
does. Flax is not imported.
"""

import inspect
import re
import typing
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from ..core._errors import definition_of
from ..core._node_types import node_type_of
from ..core._pack_and_unpack import walked
from ..core._printing import name_of_class, shown
from ..core._static_values import Static
from ..core._structure import LEAF

MOST_CANDIDATES = 5
"""How many values and paths an error lists that a filter could have selected."""


class Place(NamedTuple):
    """Where a leaf is.

    Attributes:
        path: the attribute names, keys and indices that lead to the value, as NNX writes it.
        leaf: the leaf.
        variable: the variable of NNX that holds it, or None.
        holder: the innermost module that holds it, or None. A variable is one.
    """

    path: tuple[Any, ...]
    leaf: Any
    variable: Any
    holder: Any

    @property
    def value(self) -> Any:
        """What a filter is asked about."""
        return self.leaf if self.variable is None else self.variable


class Option(NamedTuple):
    """Where a filter is given.

    Attributes:
        name: of the parameter.
        code: a call with a filter up to the filter, which messages complete.
        calls_with: what a function gets that could be called with one argument and with two.
    """

    name: str
    code: str
    calls_with: Literal["leaf", "path and value"] = "path and value"


class Filter(NamedTuple):
    """A filter that is asked about each leaf.

    Attributes:
        selects: tells whether a leaf is selected.
        asks_for_path: whether that may differ from path to path where value and holder are the same.
    """

    selects: Callable[[Place], bool]
    asks_for_path: bool = False


class FilterPrefix(NamedTuple):
    """A tree prefix of filters, or a part of one.

    Where it meets the tree shows whether such a part is a filter: a function may be a static value of the prefix.

    Attributes:
        tree: the prefix.
        option: where it was given.
        asks_for_path: whether one of the filters in it may.
    """

    tree: Any
    option: Option
    asks_for_path: bool


AnyFilter = Filter | FilterPrefix


OF_TREE = Option("filter_spec", "sharedtree.tree.partition(model, ", "leaf")


def _selects_nothing(place: Place) -> bool:  # noqa: ARG001
    return False


def _selects_everything(place: Place) -> bool:  # noqa: ARG001
    return True


# What a filter is ----------------------------------------------------------------------------------------------------


def filter_of(spec: Any, option: Option) -> AnyFilter:
    """Reads what a user gave as an option that is a filter.

    Args:
        spec: what was given.
        option: where.

    Raises:
        TypeError: if it is no filter.
    """
    if is_one_filter(spec) or spec is None or isinstance(spec, str):
        return one_filter(spec, option)
    if is_several(spec, option) or (isinstance(spec, (list, tuple)) and not spec):
        return any_of(spec, option)
    if node_type_of(spec) is None or not any(map(is_one_filter, _leaves_of(spec))):
        raise _no_filter(spec, option)
    return prefix_of(spec, option)


def filter_or_prefix(spec: Any, option: Option) -> AnyFilter:
    """Reads a filter where a list is a tree prefix if the tree has a list of as many. Errors as for `filter_of`."""
    if is_one_filter(spec) or isinstance(spec, str):
        return one_filter(spec, option)
    return prefix_of(spec, option)


def prefix_of(tree: Any, option: Option) -> FilterPrefix:
    """Reads a tree prefix of filters, or a part of one."""
    return FilterPrefix(tree, option, any(_looks_at_path(leaf, option) for leaf in _leaves_of(tree)))


def _leaves_of(spec: Any) -> list[Any]:
    """Returns the leaves of a specification, traced or static."""
    read = walked(spec)
    return [read.objects[number] for number, (op, _) in enumerate(read.records) if op is LEAF or type(op) is Static]


def _looks_at_path(part: Any, option: Option) -> bool:
    """Tells whether a leaf of a specification is a function of a path. It may also be a static value of any kind."""
    if isinstance(part, type) or not callable(part):
        return False
    try:
        return takes(part, option) == "path and value"
    except TypeError:  # it is no filter, which is said where it is met
        return False


def is_one_filter(spec: Any) -> bool:
    """Tells whether part of a prefix says what to select. A node never does, even if it can be called."""
    return spec is ... or isinstance(spec, (bool, np.bool_)) or (callable(spec) and node_type_of(spec) is None)


def is_several(spec: Any, option: Option) -> bool:
    """Tells whether a list or tuple can only be several filters of which one must select, as in NNX.

    If all of it are booleans and functions of a leaf, it may also be a tree of filters, as in Equinox, each for the
    part at its place. A namedtuple names its parts, so it is a tree, as a module is.
    """
    if type(spec) not in (list, tuple):
        return False
    return any(
        part is ...
        or isinstance(part, (str, type))
        or isinstance(typing.get_origin(part), type)
        or is_several(part, option)
        or (is_one_filter(part) and callable(part) and takes(part, option) == "path and value")
        for part in typing.cast(Sequence[Any], spec)
    )


def is_several_where_no_list_is(spec: Any, option: Option) -> bool:
    """Tells whether a list or tuple is several filters where the tree has no list or tuple of as many.

    Functions of a leaf are then, too. Booleans are not: those that do not fit are a mistake in a tree of booleans.
    """
    if type(spec) not in (list, tuple):
        return False
    are_functions = bool(spec) and all(callable(part) and is_one_filter(part) for part in spec)
    return are_functions or is_several(spec, option)


def one_filter(spec: Any, option: Option) -> Filter:
    """Reads a filter that is neither several nor a prefix. Errors as for `filter_of`."""
    if spec is None or isinstance(spec, (bool, np.bool_)) or spec is ...:
        return Filter(_selects_everything if spec is ... or spec else _selects_nothing)
    if isinstance(spec, str):
        return Filter(lambda place: getattr(place.value, "tag", None) == spec)
    cls = typing.get_origin(spec) or spec
    if isinstance(cls, type):
        return Filter(lambda place: isinstance(place.value, cls) or isinstance(place.holder, cls))
    if takes(spec, option) == "path and value":
        return Filter(lambda place: _answer(spec, place, option), asks_for_path=True)
    if option.calls_with == "leaf":  # as in Equinox, what is true selects
        return Filter(lambda place: bool(spec(place.leaf)))
    return Filter(lambda place: _checked(spec(place.leaf), spec, place, option))


def any_of(spec: Sequence[Any], option: Option) -> Filter:
    """Reads several filters, of which one must select. Errors as for `filter_of`."""
    for part in spec:
        if not (is_one_filter(part) or part is None or isinstance(part, (str, list, tuple))):
            raise _no_filter(part, option)
    filters = [any_of(part, option) if isinstance(part, (list, tuple)) else one_filter(part, option) for part in spec]
    asks_for_path = any(part.asks_for_path for part in filters)
    return Filter(lambda place: any(part.selects(place) for part in filters), asks_for_path)


def takes(function: Callable[..., Any], option: Option) -> Literal["leaf", "path and value"]:
    """Tells what a function that is a filter is called with.

    Raises:
        TypeError: if it can be called neither with a leaf nor with a path and a value.
    """
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # it has none
        return option.calls_with
    takes_leaf, takes_two = _binds(signature, 1), _binds(signature, 2)
    if takes_leaf and takes_two:
        return option.calls_with
    if not takes_leaf and not takes_two:
        raise TypeError(
            f"`{option.name}` calls {definition_of(function)} with a leaf, or with a path and the value that is there. "
            "It can be called neither with one argument nor with two. Such functions can:\n"
            f"    {option.code}lambda leaf: leaf.ndim > 1)\n"
            f"    {option.code}lambda path, value: path[-1] != 'bias')"
        )
    return "leaf" if takes_leaf else "path and value"


def _binds(signature: inspect.Signature, count: int) -> bool:
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


def _answer(function: Callable[..., Any], place: Place, option: Option) -> bool:
    return _checked(function(place.path, place.value), function, place, option)


def _checked(answer: Any, function: Callable[..., Any], place: Place, option: Option) -> bool:
    if isinstance(answer, (bool, np.bool_)):
        return bool(answer)
    raise TypeError(
        f"`{option.name}` says of each path and value whether to select it, True or False; at {place.path!r} "
        f"{definition_of(function)} returned {shown(answer)}. What an array holds cannot decide, for it may not be "
        "known yet; what is known of it can:\n"
        f"    {option.code}lambda path, value: value.ndim > 1)"
    )


def _no_filter(spec: Any, option: Option) -> TypeError:
    advice = "For example"
    if isinstance(spec, int) and option.code.startswith("sharedtree.grad"):
        advice = (
            "Which argument is differentiated is said by\n    sharedtree.grad(f, argnums=1)\nand which of its leaves by"
        )
    return TypeError(
        f"`{option.name}` is a filter: a class, a tag, a function of a leaf or of a path and a value, several of "
        f"these, or a tree of booleans, not {shown(spec)}. {advice}\n"
        f"    {option.code}lambda path, value: path[-1] != 'bias')"
    )


# What to say where it selects nothing --------------------------------------------------------------------------------


def how_to_select(candidates: Sequence[Place], spec: Any, option: Option) -> str:
    """Lines of a message that list what a filter could have selected, and offer code that selects some of it.

    Args:
        candidates: at least one.
        spec: the filter, as it was given.
        option: where.
    """
    tags = strings_in(spec)
    words = {word for tag in tags for word in re.findall(r"\w+", tag)}
    # What a string may have meant comes first.
    candidates = sorted(candidates, key=lambda place: _step_in(place, words) is None)
    lines = [f"    `{name_of_class(place.value)}` at {place.path!r}" for place in candidates[:MOST_CANDIDATES]]
    if len(candidates) > MOST_CANDIDATES:
        lines.append(f"    … and {len(candidates) - MOST_CANDIDATES} more")
    advice = "Give one or more of these classes, or a function of both:"
    if tags:
        advice = "A string is an NNX tag; for a path write"
    step = _step_in(candidates[0], words)
    code = f"    {option.code}lambda path, value: path == {candidates[0].path!r})"
    if step is not None:
        code = f"    {option.code}lambda path, value: {step!r} in path)"
    return "\n".join(["It was asked about these values and paths:", *lines, advice, code])


def _step_in(place: Place, words: set[str]) -> Any:
    return next((step for step in reversed(place.path) if str(step) in words), None)


def strings_in(spec: Any) -> list[str]:
    """The tags of NNX in a filter, as it was given."""
    if isinstance(spec, (list, tuple)):
        return [tag for part in typing.cast(Sequence[Any], spec) for tag in strings_in(part)]
    return [spec] if isinstance(spec, str) else []
