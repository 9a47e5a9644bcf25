"""Filters, which select leaves: for `tree.filter`, `tree.partition`, `optimizer` and the option `wrt` of `grad`.

A filter is one of these, in the terms of Flax NNX and of Equinox:

    nnx.Param, eqx.nn.Linear            a class: of the value, or of the module that holds the leaf
    lambda path, value: ...             a function of a path and the value there
    eqx.is_inexact_array                a function of the leaf
    "tag"                               the tag of a variable of NNX
    ..., True, False                    all, or nothing
    (nnx.Param, "tag")                  a list of filters: selects a leaf if at least one of them does
    Net(embed=True, head=nnx.Param)     a tree prefix: a filter for each part of the model

A filter is asked about the *value* at a path: the variable of NNX that holds the leaf, or without a variable the leaf
itself. Flax is not imported.

A list is ambiguous: `[f, g]` may be a list of filters, or the tree prefix for a list of two layers. `[nnx.Param, g]` is
taken for a list of filters, as in NNX. If both readings are possible, the tree decides: the list is a tree prefix where
the tree has a list of the same length.

In this file a *specification* (`spec`) is the user's object. A `Filter` is made of it, and is asked about each leaf. A
*tag* is a string: it selects the variables of NNX that have an attribute `tag` of this value.
"""

import inspect
import re
import typing
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from ..core._comparison import short_text
from ..core._errors import definition_of
from ..core._node_types import node_type_of
from ..core._pack_and_unpack import flat_dag_of
from ..core._printing import name_of_class, shown
from ..core._static_values import Static
from ..core._structure import LEAF

MOST_CANDIDATES = 5
"""The largest number of values and paths in an error about a filter without a selection."""


class LeafPlace(NamedTuple):
    """A leaf, its path, and the objects that hold it: all that filters ask about.

    Attributes:
        path: the path of the value as attribute names, keys and indices, as in NNX: `("layers", 0, "weight")`.
        leaf: the leaf.
        variable: the variable of NNX around the leaf, or None.
        holder: the innermost module around the leaf, or None. A variable of NNX counts as a module.
    """

    path: tuple[Any, ...]
    leaf: Any
    variable: Any
    holder: Any

    @property
    def value(self) -> Any:
        """The value that a filter is asked about: the variable if there is one, or else the leaf."""
        return self.leaf if self.variable is None else self.variable


class Option(NamedTuple):
    """A parameter for a filter.

    Attributes:
        name: the name of the parameter.
        code: the beginning of a call, up to the filter. Messages append a filter and a parenthesis.
        calls_with: the arguments for a function that can be called with one argument and with two.
    """

    name: str
    code: str
    calls_with: Literal["leaf", "path and value"] = "path and value"


class Filter(NamedTuple):
    """A filter that is asked about each leaf.

    Attributes:
        selects: returns True for a selected leaf.
        asks_for_path: True if the filter may answer differently at two paths of one leaf with one value and one holder.
    """

    selects: Callable[[LeafPlace], bool]
    asks_for_path: bool = False


class FilterPrefix(NamedTuple):
    """A tree prefix of filters, or a part of one.

    The leaves of the prefix become filters only when it is compared with the tree. Before, a function in it may be a
    filter or a static value: a prefix `Linear(weight=True, activation=relu)` made of a model still has the model's
    `relu`.

    Attributes:
        tree: the prefix or its part, a user's object.
        option: the parameter with this prefix.
        asks_for_path: True if at least one function in the prefix takes a path.
    """

    tree: Any
    option: Option
    asks_for_path: bool


AnyFilter = Filter | FilterPrefix


OF_TREE = Option("filter_spec", "sharedtree.tree.partition(model, ", "leaf")
"""The parameter of `tree.filter` and `tree.partition`. As in Equinox, an ambiguous function gets the leaf."""


def _selects_nothing(place: LeafPlace) -> bool:  # noqa: ARG001
    return False


def _selects_everything(place: LeafPlace) -> bool:  # noqa: ARG001
    return True


# Filters of specifications --------------------------------------------------------------------------------------------


def filter_of(spec: Any, option: Option) -> AnyFilter:
    """Makes a filter of a user's specification. A list that may be a tree prefix is taken for one.

    Args:
        spec: the specification.
        option: the parameter with this specification.

    Raises:
        TypeError: if the specification is no filter.
    """
    if is_one_filter(spec) or spec is None or isinstance(spec, str):
        return one_filter(spec, option)
    # An empty list of filters selects nothing.
    if is_several(spec, option) or (isinstance(spec, (list, tuple)) and not spec):
        return any_of(spec, option)
    # Any other object can only be a tree prefix, so it must be a node with at least one filter in it.
    if node_type_of(spec) is None or not any(map(is_one_filter, _leaves_of(spec))):
        raise _no_filter(spec, option)
    return prefix_of(spec, option)


def filter_or_prefix(spec: Any, option: Option) -> AnyFilter:
    """Makes a filter of a specification. Every list is kept as a part of a tree prefix.

    When the prefix is compared with the tree, `PartsOfPrefix` decides which of these are lists of filters.

    Raises:
        TypeError: if a function can be called neither with one argument nor with two.
    """
    if is_one_filter(spec) or isinstance(spec, str):
        return one_filter(spec, option)
    return prefix_of(spec, option)


def prefix_of(tree: Any, option: Option) -> FilterPrefix:
    """Makes a `FilterPrefix` of a tree prefix, or of a part of one."""
    return FilterPrefix(tree, option, any(_looks_at_path(leaf, option) for leaf in _leaves_of(tree)))


def _leaves_of(spec: Any) -> list[Any]:
    """Returns the leaves of a specification, traced or static."""
    flat = flat_dag_of(spec)
    leaves: list[Any] = []
    for number, (op, _) in enumerate(flat.records):
        if op is LEAF or type(op) is Static:
            leaves.append(flat.objects[number])
    return leaves


def _looks_at_path(part: Any, option: Option) -> bool:
    """Returns True if a leaf of a specification is a function of a path. The leaf may be any static value."""
    if isinstance(part, type) or not callable(part):
        return False
    try:
        return takes(part, option) == "path and value"
    # The function cannot be a filter, but it can be a static value. If it is used as a filter, that raises.
    except TypeError:
        return False


def is_one_filter(spec: Any) -> bool:
    """Returns True for a boolean, `...`, a class or a function, each of which is a filter in any part of a prefix.

    False for a node, even if it can be called: a module in a prefix is a part of the prefix, with filters in it.
    """
    return spec is ... or isinstance(spec, (bool, np.bool_)) or (callable(spec) and node_type_of(spec) is None)


def is_several(spec: Any, option: Option) -> bool:
    """Returns True if a list or tuple is a list of filters at any place in a prefix, as in NNX.

    That holds if one part is `...`, a tag, a class, a function of a path, or a list for which this returns True. A list
    of booleans and functions of a leaf only may also be a tree prefix, as in Equinox, with a filter for each part. A
    namedtuple is always a tree prefix, because it names its parts as a module does.
    """
    if type(spec) not in (list, tuple):
        return False
    for part in typing.cast(Sequence[Any], spec):
        # A generic such as `nnx.Variable[int]` stands for its class.
        if part is ... or isinstance(part, (str, type)) or isinstance(typing.get_origin(part), type):
            return True
        if is_several(part, option):
            return True
        if is_one_filter(part) and callable(part) and takes(part, option) == "path and value":
            return True
    return False


def is_several_where_no_list_is(spec: Any, option: Option) -> bool:
    """Returns True if a list or tuple is a list of filters where the tree has no list of the same length.

    At these places a list of functions of a leaf is a list of filters, too. A list of booleans is not: it was meant as
    a tree of booleans, which does not fit, so the caller raises.
    """
    if type(spec) not in (list, tuple):
        return False
    are_functions = bool(spec) and all(callable(part) and is_one_filter(part) for part in spec)
    return are_functions or is_several(spec, option)


def one_filter(spec: Any, option: Option) -> Filter:
    """Makes a filter of a specification that is neither a list nor a prefix. None selects nothing.

    Raises:
        TypeError: if the specification is a function that can be called neither with one argument nor with two.
    """
    if spec is None or isinstance(spec, (bool, np.bool_)) or spec is ...:
        return Filter(_selects_everything if spec is ... or spec else _selects_nothing)
    if isinstance(spec, str):
        return Filter(lambda place: getattr(place.value, "tag", None) == spec)
    # The class of a generic: `nnx.Variable` for `nnx.Variable[int]`.
    cls = typing.get_origin(spec) or spec
    if isinstance(cls, type):
        return Filter(lambda place: isinstance(place.value, cls) or isinstance(place.holder, cls))
    if takes(spec, option) == "path and value":
        return Filter(lambda place: _answer(spec, place, option), asks_for_path=True)
    # In Equinox, a function of a leaf may return any object, and its truth value counts. In NNX it must be a boolean.
    if option.calls_with == "leaf":
        return Filter(lambda place: bool(spec(place.leaf)))
    return Filter(lambda place: _checked(spec(place.leaf), spec, place, option))


def any_of(spec: Sequence[Any], option: Option) -> Filter:
    """Makes a filter of a list of filters. It selects a leaf if at least one of them does.

    Raises:
        TypeError: if a part is no filter.
    """
    for part in spec:
        if not (is_one_filter(part) or part is None or isinstance(part, (str, list, tuple))):
            raise _no_filter(part, option)
    filters: list[Filter] = []
    for part in spec:
        if isinstance(part, (list, tuple)):
            filters.append(any_of(part, option))
        else:
            filters.append(one_filter(part, option))
    asks_for_path = any(part.asks_for_path for part in filters)
    return Filter(lambda place: any(part.selects(place) for part in filters), asks_for_path)


def takes(function: Callable[..., Any], option: Option) -> Literal["leaf", "path and value"]:
    """Returns the arguments with which a filter is called if it is a function.

    Raises:
        TypeError: if the function can be called neither with a leaf nor with a path and a value.
    """
    try:
        signature = inspect.signature(function)
    # Some functions written in C have no signature.
    except (ValueError, TypeError):
        return option.calls_with
    takes_leaf, takes_two = _binds(signature, 1), _binds(signature, 2)
    if takes_leaf and takes_two:
        return option.calls_with
    if not takes_leaf and not takes_two:
        raise TypeError(
            f"{definition_of(function)} cannot be a filter for `{option.name}`. A filter must take one argument (a "
            "leaf) or two (a path and the value there):\n"
            f"    {option.code}lambda leaf: leaf.ndim > 1)\n"
            f"    {option.code}lambda path, value: path[-1] != 'bias')"
        )
    return "leaf" if takes_leaf else "path and value"


def _binds(signature: inspect.Signature, count: int) -> bool:
    """Returns True if a function with this signature can be called with `count` positional arguments."""
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


def _answer(function: Callable[..., Any], place: LeafPlace, option: Option) -> bool:
    """Calls a function of a path and a value, and returns its boolean."""
    return _checked(function(place.path, place.value), function, place, option)


def _checked(answer: Any, function: Callable[..., Any], place: LeafPlace, option: Option) -> bool:
    """Returns the answer of a filter as a bool.

    Args:
        answer: the object that the function returned.
        function: the function.
        place: the place about which it was asked.
        option: the parameter with the filter.

    Raises:
        TypeError: if the answer is no boolean, for example a traced array.
    """
    if isinstance(answer, (bool, np.bool_)):
        return bool(answer)
    raise TypeError(
        f"{definition_of(function)} must return True or False for `{option.name}`, but returned {short_text(answer)} "
        f"at {place.path!r}. The values in an array cannot decide, since they may be traced. Its shape and dtype "
        "can:\n"
        f"    {option.code}lambda path, value: value.ndim > 1)"
    )


def _no_filter(spec: Any, option: Option) -> TypeError:
    """Returns the error for a specification if it is no filter."""
    position = ""
    # `grad(f, wrt=1)` is `argnums` by mistake.
    if isinstance(spec, int) and option.code.startswith("sharedtree.grad"):
        position = (
            "To differentiate with respect to the argument at a position, use `argnums`:\n"
            "    sharedtree.grad(f, argnums=1)\n"
            f"`{option.name}` selects leaves inside the argument. "
        )
    return TypeError(
        f"`{option.name}` must be a filter, but is {shown(spec)}.\n"
        f"{position}A filter may be a class, a tag of Flax NNX, a function (of a leaf, or of a path and a value), a "
        "tuple of these, or a tree of booleans. For example:\n"
        f"    {option.code}lambda path, value: path[-1] != 'bias')"
    )


# Advice if a filter selects nothing ---------------------------------------------------------------------------------


def how_to_select(candidates: Sequence[LeafPlace], spec: Any, option: Option) -> str:
    """Returns text for an error about a filter without selected leaves: some candidates, and code to select one.

    Args:
        candidates: places that a filter could select, at least one. The filter was asked about each.
        spec: the user's specification.
        option: the parameter with this specification.
    """
    tags = strings_in(spec)
    words = {word for tag in tags for word in re.findall(r"\w+", tag)}
    # A string was perhaps meant as a name in a path, so the places with such a name come first.
    candidates = sorted(candidates, key=lambda place: _step_in(place, words) is None)
    lines = [f"    `{name_of_class(place.value)}` at {place.path!r}" for place in candidates[:MOST_CANDIDATES]]
    if len(candidates) > MOST_CANDIDATES:
        lines.append(f"    … and {len(candidates) - MOST_CANDIDATES} more")
    advice = "Use one or more of these classes, or a function of a path and a value:"
    if tags:
        advice = "A string selects by a tag of NNX, not by a path. To select by path, use a function:"
    step = _step_in(candidates[0], words)
    code = f"    {option.code}lambda path, value: path == {candidates[0].path!r})"
    if step is not None:
        code = f"    {option.code}lambda path, value: {step!r} in path)"
    return "\n".join(["These could be selected, each listed at its first path:", *lines, advice, code])


def _step_in(place: LeafPlace, words: set[str]) -> Any:
    """Returns the last step in the path of a place whose text is one of the words. None if no step is."""
    return next((step for step in reversed(place.path) if str(step) in words), None)


def strings_in(spec: Any) -> list[str]:
    """Returns the strings in a specification and in its nested lists. They are tags of NNX."""
    if isinstance(spec, (list, tuple)):
        return [tag for part in typing.cast(Sequence[Any], spec) for tag in strings_in(part)]
    return [spec] if isinstance(spec, str) else []
