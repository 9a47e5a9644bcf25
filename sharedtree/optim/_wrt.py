"""With respect to which leaves: `wrt=` of `grad`, its family and `optimizer`, a filter in the terms of Flax NNX.

A filter is asked at every path of every leaf of a model, about the *value* there: the variable of NNX that holds the
leaf, or the leaf itself where none does. What it answers becomes a prefix of the model, so that under a transform one
object at two paths with two answers is what it is under `in_axes`, too: an array parts, a module is an error.

    Net(kernel=Param(k), mean=BatchStat(m), rest=[x, y])  under  wrt=nnx.Param      Branch(True, False, False)

Where a whole branch has one answer, the answer stands for the branch. Flax is not imported.
"""

import inspect
import typing
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import tree_util as jtu

from ..core._by_identity import IdentitySet
from ..core._errors import InconsistentSharingError
from ..core._library_rows import argument_and_filter
from ..core._node_types import is_module
from ..core._pack_and_unpack import Tags, walk
from ..core._prefix_trees import Branch
from ..core._printing import MOST_PATHS, name_of_class, shown
from ..core._structure import LEAF, Node
from ..core._warning_source import definition_of
from ..tree._dag import Dag


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


class Filter(NamedTuple):
    """What an option `wrt` says.

    Attributes:
        selects: whether a leaf is differentiated.
        asks_for_path: whether that may differ from path to path where value and holder are the same.
    """

    selects: Callable[[Place], bool]
    asks_for_path: bool = False


OF_GRAD = "sharedtree.grad(f"
OF_OPTIMIZER = "sharedtree.optimizer(tx"


def filter_of(wrt: Any, call: str = OF_GRAD) -> Filter:
    """What an option `wrt` selects.

    Args:
        wrt: the option.
        call: that it is an option of, as the beginning of the code that messages offer.

    Raises:
        TypeError: if it is no filter.
    """
    if wrt is ... or isinstance(wrt, bool) or wrt is None:
        answer = bool(wrt)
        return Filter(lambda _: answer)
    if isinstance(wrt, str):
        return Filter(lambda place: getattr(place.value, "tag", None) == wrt)
    cls = typing.get_origin(wrt) or wrt
    if isinstance(cls, type):
        return Filter(lambda place: isinstance(place.value, cls) or isinstance(place.holder, cls))
    if isinstance(wrt, (list, tuple)):
        filters = [filter_of(each, call) for each in typing.cast(Sequence[Any], wrt)]
        return Filter(
            lambda place: any(each.selects(place) for each in filters), any(each.asks_for_path for each in filters)
        )
    if callable(wrt):
        _require_two_parameters(wrt, call)
        return Filter(lambda place: _answer(wrt, place, call), asks_for_path=True)
    advice = "For example"
    if isinstance(wrt, int) and call == OF_GRAD:
        advice = f"Which argument is differentiated is said by\n    {call}, argnums=1)\nand which of its leaves by"
    raise TypeError(
        f"`wrt` is a filter: a class, a tag, a function of a path and a value, or several of these, not {shown(wrt)}. "
        f"{advice}\n    {call}, wrt=lambda path, value: path[-1] != 'bias')"
    )


def _require_two_parameters(predicate: Callable[..., Any], call: str) -> None:
    try:
        inspect.signature(predicate).bind(None, None)
    except ValueError:  # it has no signature
        return
    except TypeError:
        name = getattr(predicate, "__name__", "")
        name = name if name.isidentifier() else "predicate"
        raise TypeError(
            f"`wrt` calls {definition_of(predicate)} with a path and the value that is there, and it does not take the "
            "two. Let a function of two hand on what it needs:\n"
            f"    {call}, wrt=lambda path, value: {name}(value))"
        ) from None


def _answer(predicate: Callable[..., Any], place: Place, call: str) -> bool:
    answer = predicate(place.path, place.value)
    if isinstance(answer, (bool, np.bool_)):
        return bool(answer)
    raise TypeError(
        f"`wrt` says of each path and value whether to select it, True or False; at {place.path!r} "
        f"{definition_of(predicate)} returned {shown(answer)}. What an array holds cannot decide, for it may not be "
        "known yet; what is known of it can:\n"
        f"    {call}, wrt=lambda path, value: value.ndim > 1)"
    )


def selection(argument: Any, wrt: Filter, name: str) -> Any:
    """The prefix of an argument that says which leaves a filter selects: True, False, or a `Branch` of such.

    Args:
        argument: with its modules in it.
        wrt: the filter.
        name: what the argument is called, for errors.

    Raises:
        InconsistentSharingError: if the filter selects a leaf of a `Dag` at one path and not at another.

    Cost: one question for each path, or for each leaf where the path makes no difference.
    """
    return _selection(argument, wrt, name, Place((), None, None, None))[0]


def select_everywhere(arguments: Sequence[Any], wrt: Filter, leaves: Sequence[Any]) -> str:
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

    def ask(place: Place) -> bool:
        answer = wrt.selects(place)
        if answer:
            selected.add(place.leaf)
        elif place.leaf in wanted:
            others.append((place.leaf, place.path))
        return answer

    for argument in arguments if wrt.asks_for_path else ():
        selection(argument, Filter(ask, asks_for_path=True), "")
    # What is selected nowhere is to stay so.
    return _selecting(list(dict.fromkeys(path for leaf, path in others if leaf in selected)))


def _selecting(paths: Sequence[tuple[Any, ...]]) -> str:
    if not 0 < len(paths) <= MOST_PATHS or any(type(step) not in (str, int) for path in paths for step in path):
        return ""
    return f"Select it at its other paths, too:\n    wrt = [wrt, lambda path, value: path in {paths!r}]\n"


class _Asked(NamedTuple):
    """What was answered about a leaf at one of its paths: in words, and as filters see it."""

    text: str
    path: tuple[Any, ...]
    answer: bool


def _selection(tree: Any, wrt: Filter, name: str, above: Place) -> tuple[Any, list[list[_Asked]]]:
    """The prefix of a tree below a place, and for each of its leaves the paths with their answers."""
    tags = Tags()
    _, records, root = walk(tree, tags)
    asked: dict[int, list[_Asked]] = {number: [] for number, (op, _) in enumerate(records) if op is LEAF}
    done: list[Any] = []
    # Where paths make no difference: a record under a variable and a holder, which are alive in `tags` → its answer.
    known: dict[tuple[int, int, int], Any] = {}
    # Each entry: a record, the path to it, its place, and whether what is below it has been done.
    stack: list[tuple[int, tuple[Any, ...], Place, bool]] = [(root, (), above, False)]
    while stack:
        number, path, place, is_done = stack.pop()
        op, children = records[number]
        obj = tags.objects[number]
        under = number, id(place.variable), id(place.holder)  # as above
        if not wrt.asks_for_path and under in known:
            done.append(known[under])
        elif is_done:
            below = done[len(done) - len(children) :]
            del done[len(done) - len(children) :]
            known[under] = _joined(below)
            done.append(known[under])
        elif op is LEAF:
            answer = wrt.selects(place._replace(leaf=obj))
            asked[number].append(_Asked(name + jtu.keystr(path), place.path, answer))
            done.append(answer)
        elif type(op) is not Node or not children:
            done.append(None)
        elif isinstance(obj, Dag):
            done.append(_of_dag(obj, wrt, name + jtu.keystr(path), place._replace(holder=obj)))
        else:
            inner = place
            if place.variable is None and is_module(obj):
                inner = place._replace(holder=obj, variable=obj if op.type.convention == "variable" else None)
            stack.append((number, path, place, True))
            for key, child in reversed(list(zip(op.keys, children, strict=True))):
                # What is in a variable is, to NNX, the variable.
                steps = () if inner.variable is not None else (_part_of_path(key),)
                there = inner._replace(path=(*inner.path, *steps))
                stack.append((child, (*path, key), there, False))
    return (False if done[0] is None else done[0]), list(asked.values())


def _joined(answers: Sequence[Any]) -> Any:
    """One answer for all, if all have it; None is of what holds no leaf."""
    own = [answer for answer in answers if answer is not None]
    if not own:
        return None
    if all(answer is own[0] for answer in own) and isinstance(own[0], bool):
        return own[0]
    return Branch(tuple([answer if answer is not None else False for answer in answers]))


def _of_dag(dag: Dag[Any], wrt: Filter, name: str, above: Place) -> Any:
    """The same of a `Dag`, whose children are its leaves: each is one, whatever its paths."""
    answers: list[bool] = []
    leaves = _selection(dag.tree, wrt, name, above)[1]
    for asked in leaves:
        if len({each.answer for each in asked}) > 1:
            treatments = ["differentiated" if each.answer else "not differentiated" for each in asked]
            lines = [f"    `{each.text}` is {words}" for each, words in zip(asked, treatments, strict=True)]
            cut = [each for each in leaves if wrt.asks_for_path and any(one.answer for one in each)]
            others = [each.path for one in cut for each in one if not each.answer]
            raise InconsistentSharingError(
                "\n".join(
                    [
                        "One leaf of a `Dag`, but `wrt` selects it at one path and not at another:",
                        *lines[:MOST_PATHS],
                        _selecting(others)
                        + "A `Dag` has each leaf once. Select it at all of its paths, or make it several before:",
                        "    dag = sharedtree.Dag(sharedtree.untie(dag.tree))",
                    ]
                ),
                [each.text for each in asked],
                treatments,
            )
        answers.append(asked[0].answer)
    return _joined(answers)


def _part_of_path(key: Any) -> Any:
    """A step of a path as NNX writes it: an attribute's name, a key, an index."""
    for name in ("name", "key", "idx"):
        if hasattr(key, name):
            return getattr(key, name)
    return str(key)


def require_nothing_left(
    arguments: Sequence[Any], can_be_differentiated: Callable[[Any], bool], wrt: Any, call: str = OF_GRAD
) -> None:
    """Raises if there is a leaf that could be differentiated, in arguments of which a filter selects none.

    Args:
        arguments: with their modules in them.
        can_be_differentiated: whether a leaf can.
        wrt: the filter, as it was given.
        call: that it is an option of.

    Raises:
        ValueError: which says what there is.
    """
    found: list[Place] = []

    def note(place: Place) -> bool:
        found.append(place)
        return True

    for argument in arguments:
        selection(argument, Filter(note), "")
    left = [place for place in found if can_be_differentiated(place.leaf)]
    if not left:
        return
    lines = [f"    `{name_of_class(place.value)}` at {place.path!r}" for place in left[:MOST_PATHS]]
    asked = [str(definition_of(function)) for function in _functions_in(wrt)]
    given = f"`wrt`, which asks {' and '.join(asked)}," if asked else f"`wrt={shown(wrt)}`"
    if len(left) > MOST_PATHS:
        lines.append(f"    … and {len(left) - MOST_PATHS} more")
    raise ValueError(
        "\n".join(
            [
                f"{given} selects nothing that can be differentiated. It was asked about these values and paths:",
                *lines,
                "Give one or more of these classes, or a function of both:",
                f"    {call}, wrt=lambda path, value: path == {left[0].path!r})",
            ]
        )
    )


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
