"""What a filter selects of a tree: it is asked about each leaf, and what it answers becomes a prefix of the tree.

    Net(kernel=Param(k), mean=BatchStat(m), rest=[x, y])  under  nnx.Param      Branch(True, False, False)

Where a whole branch has one answer, the answer stands for the branch. So under a transform one object at two paths with
two answers is what it is under `in_axes`, too: an array parts, a module is an error.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import tree_util as jtu

from ..core._by_identity import IdentityDict
from ..core._errors import InconsistentSharingError, SharingMismatchError
from ..core._node_types import is_module, node_type_of
from ..core._pack_and_unpack import walked
from ..core._prefix_trees import Branch, parts_for
from ..core._printing import MOST_PATHS, listed, name_of_class, shown
from ..core._static_values import Static
from ..core._structure import LEAF, Node, Path
from ..core._trees_taken_apart import Walked
from ._dag import Dag
from ._filters import Filter, Option, Place, Prefix, any_of, is_one_filter, is_several, one_filter, selects_nothing


def selection(argument: Any, spec: Filter, name: str) -> Any:
    """The prefix of an argument that says which traced leaves a filter selects: True, False, or a `Branch` of such.

    Args:
        argument: with its modules in it.
        spec: the filter.
        name: what the argument is called, for errors.

    Raises:
        InconsistentSharingError: if the filter selects a leaf of a `Dag` at one path and not at another.
        SharingMismatchError: if it is a tree prefix that does not fit.

    Cost: one question for each path, or for each leaf where the path makes no difference.
    """
    return ask(walked(argument), spec, name).prefix


class Asked(NamedTuple):
    """What was answered about a leaf at one of its paths, which is here in two forms: of JAX's keys, and of NNX's."""

    keys: Path
    path: tuple[Any, ...]
    answer: bool


class Answers(NamedTuple):
    """What a filter said of a tree.

    Attributes:
        prefix: True, False, or a `Branch` of such.
        of_leaves: for each leaf, by its number, what was answered at its paths.
    """

    prefix: Any
    of_leaves: dict[int, list[Asked]]


class _Visit(NamedTuple):
    """A record on its path, what a filter is asked about there, the filter, and whether what is below has been done."""

    number: int
    keys: Path
    place: Place
    spec: Filter
    is_done: bool = False


class Words(NamedTuple):
    """What an option is called in errors, and what is said of a leaf that it selects, or does not select."""

    option: str
    selected: str
    not_selected: str

    def of(self, answer: bool) -> str:
        """What is said of a leaf."""
        return self.selected if answer else self.not_selected


IN_WRT = Words("wrt", "differentiated", "not differentiated")
IN_TREE = Words("filter_spec", "selected", "not selected")

ROOT = Place((), None, None, None)


def ask(
    tree: Walked,
    spec: Filter,
    name: str = "",
    above: Place = ROOT,
    *,
    asks_static: bool = False,
    words: Words = IN_WRT,
) -> Answers:
    """Asks a filter about the leaves of a tree.

    Args:
        tree: the tree, with its objects.
        spec: the filter.
        name: what the tree is called, for errors.
        above: where the tree is.
        asks_static: whether static leaves are asked about, too; otherwise they have no part in the answer.
        words: of errors.

    Raises:
        As `selection`.
    """
    of_leaves: dict[int, list[Asked]] = {
        number: [] for number, (op, _) in enumerate(tree.records) if op is LEAF or (asks_static and type(op) is Static)
    }
    done: list[Any] = []
    # Where paths make no difference: a record under a variable, a holder and a filter → its answer. The first two are
    # alive in `tree`, the filters in `parts`.
    known: dict[tuple[int, int, int, int], Any] = {}
    parts = _PartsOfPrefix(spec)
    left_over: list[tuple[Filter, Path]] = []
    stack = [_Visit(tree.root, (), above, spec)]
    while stack:
        number, keys, place, here, is_done = stack.pop()
        op, children = tree.records[number]
        obj = tree.objects[number]
        under = number, id(place.variable), id(place.holder), id(here)  # as above
        if not here.asks_for_path and under in known:
            done.append(known[under])
        elif is_done:
            below = done[len(done) - len(children) :]
            del done[len(done) - len(children) :]
            known[under] = _joined(below)
            done.append(known[under])
        elif number in of_leaves:
            answer = None
            if type(op) is Static and keys and _is_left_over(here, op):
                left_over.append((here, keys))
            else:
                answer = parts.at_leaf(here, keys).selects(place._replace(leaf=obj))
                of_leaves[number].append(Asked(keys, place.path, answer))
            known[under] = answer
            done.append(answer)
        elif type(op) is not Node or not children:
            done.append(None)
        elif isinstance(obj, Dag) and not (here.prefix is not None and isinstance(here.prefix.tree, Dag)):
            answers = _of_dag(obj, here, name + jtu.keystr(keys), place._replace(holder=obj), words)
            for key, child, answer in zip(op.keys, children, answers, strict=True):
                if child in of_leaves:
                    of_leaves[child].append(Asked((*keys, key), place.path, answer))
            done.append(_joined(answers))
        else:
            inner = place
            if place.variable is None and is_module(obj):
                inner = place._replace(holder=obj, variable=obj if op.type.convention == "variable" else None)
            stack.append(_Visit(number, keys, place, here, is_done=True))
            filters = parts.below(here, op, len(children), keys)
            for key, child, part in reversed(list(zip(op.keys, children, filters, strict=True))):
                # What is in a variable is, to NNX, the variable.
                steps = () if inner.variable is not None else (_part_of_path(key),)
                there = inner._replace(path=(*inner.path, *steps))
                stack.append(_Visit(child, (*keys, key), there, part))
    if left_over:
        raise _left_over(left_over)
    return Answers(False if done[0] is None else done[0], of_leaves)


def _joined(answers: Sequence[Any]) -> Any:
    """One answer for all, if all have it; None is of what holds no leaf."""
    own = [answer for answer in answers if answer is not None]
    if not own:
        return None
    if all(answer is own[0] for answer in own) and isinstance(own[0], bool):
        return own[0]
    return Branch(tuple([answer if answer is not None else False for answer in answers]))


def _of_dag(dag: Dag[Any], spec: Filter, name: str, above: Place, words: Words) -> list[bool]:
    """The answer for each leaf of a `Dag`: each is one, whatever its paths."""
    answers: list[bool] = []
    of_leaves = list(ask(walked(dag.tree), spec, name, above, words=words).of_leaves.values())
    for asked in of_leaves:
        if len({each.answer for each in asked}) > 1:
            treatments = [words.of(each.answer) for each in asked]
            texts = [name + jtu.keystr(each.keys) for each in asked]
            lines = [f"    `{text}` is {treatment}" for text, treatment in zip(texts, treatments, strict=True)]
            cut = [each for each in of_leaves if spec.asks_for_path and any(one.answer for one in each)]
            others = [each.path for one in cut for each in one if not each.answer]
            raise InconsistentSharingError(
                "\n".join(
                    [
                        f"One leaf of a `Dag`, but `{words.option}` selects it at one path and not at another:",
                        *lines[:MOST_PATHS],
                        code_that_selects(others, spec, words.option)
                        + "A `Dag` has each leaf once. Select it at all of its paths, or make it several before:",
                        "    dag = sharedtree.Dag(sharedtree.untie(dag.tree))",
                    ]
                ),
                texts,
                treatments,
            )
        answers.append(asked[0].answer)
    return answers


def _part_of_path(key: Any) -> Any:
    """A step of a path as NNX writes it: an attribute's name, a key, an index."""
    for name in ("name", "key", "idx"):
        if hasattr(key, name):
            return getattr(key, name)
    return str(key)


def code_that_selects(paths: Sequence[tuple[Any, ...]], spec: Filter, name: str = "wrt", brackets: str = "[]") -> str:
    """Lines of a message with a filter that selects these paths, too, empty if it could not be written down."""
    can_be_written = all(type(step) in (str, int) for path in paths for step in path)
    if spec.prefix is not None or not 0 < len(paths) <= MOST_PATHS or not can_be_written:
        return ""
    begin, end = brackets
    return (
        "Select it at its other paths, too:\n"
        f"    {name} = {begin}{name}, lambda path, value: path in {list(paths)!r}{end}\n"
    )


class _PartsOfPrefix:
    """The filters that a tree prefix has at its nodes, each made once, so that what is shared is asked about once.

    Args:
        root: the filter with the whole prefix.
    """

    def __init__(self, root: Filter) -> None:
        self._asks_for_path = root.asks_for_path
        # The keys are parts of the prefix, which are kept alive, and with them the filters that `known` has by address.
        self._parts: IdentityDict[Filter] = IdentityDict()
        self._filters: IdentityDict[Filter] = IdentityDict()

    def below(self, here: Filter, node: Node, num_children: int, keys: Path) -> Sequence[Filter]:
        """The filter for each child of a node."""
        if here.prefix is None:
            return [here] * num_children
        part, option = here.prefix
        has_list = node.type.cls is type(part) and isinstance(part, (list, tuple)) and len(part) == num_children
        if is_one_filter(part) or (not has_list and is_several(part, option)):
            return [self._filter(here.prefix)] * num_children
        return [self._part(below, option) for below in parts_for(part, node, num_children, option.name, keys)]

    def at_leaf(self, here: Filter, keys: Path) -> Filter:
        """The filter for a leaf."""
        if here.prefix is None:
            return here
        part, option = here.prefix
        if is_one_filter(part) or is_several(part, option):
            return self._filter(here.prefix)
        raise _not_a_filter(part, jtu.keystr(keys), option)

    def _part(self, part: Any, option: Option) -> Filter:
        """Part of the prefix, which shows where it is met whether it is a filter: a function may be a static value."""
        if part not in self._parts:
            self._parts[part] = Filter(selects_nothing, self._asks_for_path, Prefix(part, option))
        return self._parts[part]

    def _filter(self, prefix: Prefix) -> Filter:
        part, option = prefix
        if part not in self._filters:
            make = one_filter if is_one_filter(part) else any_of
            self._filters[part] = make(part, option)
        return self._filters[part]


def _is_left_over(here: Filter, op: Static) -> bool:
    """Whether a specification has a static value where the tree has one, which nobody can have meant as a filter."""
    if here.prefix is None:
        return False
    part = here.prefix.tree
    if part is ... or isinstance(part, (bool, np.bool_)) or node_type_of(part) is not None:
        return False
    # A function may have been said for what is no function.
    return not callable(part) or callable(op.peek())


def _not_a_filter(part: Any, path: str, option: Option) -> SharingMismatchError:
    advice = (
        f"If this is meant to be called, say so:\n    {option.name} = lambda leaf: spec(leaf)"
        if callable(part)
        else "Write True or False there."
    )
    return SharingMismatchError(
        f"`{option.name}` has a `{name_of_class(part)}` at `{path}`, where the tree has a leaf. It is made of booleans "
        f"and functions that take a leaf, in the nodes of the tree. {advice}",
        (path,),
    )


def _left_over(found: Sequence[tuple[Filter, Path]]) -> SharingMismatchError:
    assert found[0][0].prefix is not None
    (value, option), paths = found[0][0].prefix, [jtu.keystr(keys) for _, keys in found]
    name = option.name
    return SharingMismatchError(
        f"`{name}` has {shown(value)} at {listed(paths)}, where the tree has a static value. That is "
        "no boolean, and a function there would be called as a filter.\n"
        "`sharedtree.tree.map` maps the traced leaves, and keeps the static ones. A specification that has a boolean "
        "at every leaf begins as\n"
        f"    {name} = sharedtree.tree.filter(model, False, replace=False)\n"
        "and one that has booleans at all other leaves is completed by\n"
        f"    {name} = sharedtree.tree.filter({name}, lambda leaf: isinstance(leaf, bool), replace=False)",
        paths,
    )
