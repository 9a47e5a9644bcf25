"""What a filter selects of a tree: it is asked about each leaf, and what it answers becomes a prefix of the tree.

    Net(kernel=Param(k), mean=BatchStat(m), rest=[x, y])  under  nnx.Param      Branch(True, False, False)

Where a whole branch has one answer, the answer stands for the branch. So under a transform one object at two paths with
two answers is what it is under `in_axes`, too: an array parts, a module is an error.

A record is asked about once where the path makes no difference, and equal branches are one object, so a tower of sixty
layers that each hold the one below twice costs sixty steps. A function of a path is asked at each path, of which there
may be too many.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import tree_util as jtu

from ..core._by_identity import IdentityDict
from ..core._errors import InconsistentSharingError, SharingMismatchError
from ..core._flat_dags import FlatDag
from ..core._node_types import is_module, node_type_of
from ..core._pack_and_unpack import walked
from ..core._prefix_trees import branch_of, parts_for
from ..core._printing import MOST_PATHS, listed, name_of_class, shown
from ..core._static_values import Static
from ..core._structure import LEAF, Node, Path
from ._dag import Dag
from ._filters import (
    AnyFilter,
    Filter,
    FilterPrefix,
    Option,
    Place,
    any_of,
    is_one_filter,
    is_several_where_no_list_is,
    one_filter,
    prefix_of,
)

MOST_REPEATED_VISITS = 100_000
"""Visits of records that were visited before, which a function of a path may make. It bounds the time to seconds."""


def selection(argument: Any, spec: AnyFilter, name: str) -> Any:
    """Returns the prefix of an argument that says which traced leaves a filter selects: True, False, or a `Branch`.

    Args:
        argument: with its modules in it.
        spec: the filter.
        name: what the argument is called, for errors.

    Raises:
        InconsistentSharingError: if the filter selects a leaf of a `Dag` at one path and not at another.
        SharingMismatchError: if it is a tree prefix that does not fit.
        ValueError: if it looks at paths, and there are too many.

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
        prefix: True, False, or a `Branch` of such. Equal ones are one object.
        of_leaves: for each leaf, by its number, what was answered at its paths.
    """

    prefix: Any
    of_leaves: dict[int, list[Asked]]


class Words(NamedTuple):
    """What an option is called in errors, and what is said of a leaf that it selects, or does not select."""

    option: str
    selected: str
    not_selected: str

    def of(self, answer: bool) -> str:
        """Returns what is said of a leaf."""
        return self.selected if answer else self.not_selected


IN_WRT = Words("wrt", "differentiated", "not differentiated")
IN_TREE = Words("filter_spec", "selected", "not selected")

ROOT = Place((), None, None, None)


def ask(
    tree: FlatDag,
    spec: AnyFilter,
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
    return _Questions(tree, spec, name, words, asks_static=asks_static).asked_from(above)


class _Visit(NamedTuple):
    """A record on its path, what a filter is told of there, and the filter.

    Attributes:
        record: the number of the record.
        keys: the path to it.
        place: what a filter is told.
        spec: the filter.
        is_done: whether what is below has been done.
        is_below_view: whether the path leads through a view.
    """

    record: int
    keys: Path
    place: Place
    spec: AnyFilter
    is_done: bool = False
    is_below_view: bool = False


class _Questions:
    """A filter that is being asked about the leaves of a tree. The parameters are those of `ask`."""

    def __init__(self, tree: FlatDag, spec: AnyFilter, name: str, words: Words, *, asks_static: bool) -> None:
        self._tree = tree
        self._spec = spec
        self._name = name
        self._words = words
        self._parts = PartsOfPrefix()
        self._of_leaves: dict[int, list[Asked]] = {
            number: []
            for number, (op, _) in enumerate(tree.records)
            if op is LEAF or (asks_static and type(op) is Static)
        }
        # Record, variable, holder and filter → answer; None is of what holds no leaf. The objects whose addresses are
        # here are alive in `tree`, and the filters in `_parts`.
        self._answers: dict[tuple[int, int, int, int], Any] = {}
        self._left_over: list[tuple[FilterPrefix, Path]] = []
        self._visited: set[int] = set()
        self._num_repeated = 0
        self._own_places: dict[int, _Visit] = {}

    def asked_from(self, above: Place) -> Answers:
        """Visits every record, on every path where the filter looks at paths."""
        root = _Visit(self._tree.root, (), above, self._spec)
        if any(type(op) is Node and op.type.is_view for op, _ in self._tree.records):
            self._own_places = self._find_own_places(root)
        # The answers of what has been visited, below what waits for them.
        done: list[Any] = []
        stack = [root]
        while stack:
            visit = stack.pop()
            key = visit.record, id(visit.place.variable), id(visit.place.holder), id(visit.spec)  # as of `_answers`
            children = self._tree.records[visit.record][1]
            if not visit.spec.asks_for_path and key in self._answers:
                done.append(self._answers[key])
                continue
            if visit.is_done:
                answer = _joined(done[len(done) - len(children) :])
                del done[len(done) - len(children) :]
            elif visit.record in self._of_leaves:
                answer = self._of_leaf(visit)
            elif not children:
                answer = None
            elif self._is_dag(visit):
                answer = self._of_dag(visit)
            else:
                self._count(visit)
                stack.append(visit._replace(is_done=True))
                stack.extend(reversed(self._below(visit)))
                continue
            self._answers[key] = answer
            done.append(answer)
        if self._left_over:
            raise _left_over(self._left_over)
        return Answers(False if done[0] is None else done[0], self._of_leaves)

    def _find_own_places(self, root: _Visit) -> dict[int, _Visit]:
        """The first visit of each record that a path leads to which goes through no view."""
        own_places: dict[int, _Visit] = {}
        stack = [root]
        while stack:
            visit = stack.pop()
            if visit.record in own_places:
                continue
            own_places[visit.record] = visit
            op, children = self._tree.records[visit.record]
            if children and visit.record not in self._of_leaves and not self._is_dag(visit):
                assert type(op) is Node
                if not op.type.is_view:
                    stack.extend(reversed(self._below(visit)))
        return own_places

    def _count(self, visit: _Visit) -> None:
        if visit.record in self._visited:
            self._num_repeated += 1
        self._visited.add(visit.record)
        if self._num_repeated > MOST_REPEATED_VISITS:
            raise too_many_paths(self._words.option, _num_paths(self._tree, self._of_leaves))

    def _of_leaf(self, visit: _Visit) -> bool | None:
        op, leaf = self._tree.records[visit.record][0], self._tree.objects[visit.record]
        if type(op) is Static and visit.keys and isinstance(visit.spec, FilterPrefix) and _is_static(visit.spec, op):
            self._left_over.append((visit.spec, visit.keys))
            return None
        answer = self._parts.at_leaf(visit.spec, visit.keys).selects(visit.place._replace(leaf=leaf))
        self._of_leaves[visit.record].append(Asked(visit.keys, visit.place.path, answer))
        return answer

    def _is_dag(self, visit: _Visit) -> bool:
        """Tells whether a record is a `Dag`, and no part of a prefix says of it what to select."""
        has_own_part = isinstance(visit.spec, FilterPrefix) and isinstance(visit.spec.tree, Dag)
        return isinstance(self._tree.objects[visit.record], Dag) and not has_own_part

    def _of_dag(self, visit: _Visit) -> Any:
        op, children = self._tree.records[visit.record]
        assert type(op) is Node
        dag = self._tree.objects[visit.record]
        place = visit.place._replace(holder=dag)
        answers = _answers_of_dag(dag, visit.spec, self._name + jtu.keystr(visit.keys), place, self._words)
        for key, child, answer in zip(op.keys, children, answers, strict=True):
            if child in self._of_leaves:
                self._of_leaves[child].append(Asked((*visit.keys, key), visit.place.path, answer))
        return _joined(answers)

    def _below(self, visit: _Visit) -> list[_Visit]:
        op, children = self._tree.records[visit.record]
        assert type(op) is Node
        obj, place = self._tree.objects[visit.record], visit.place
        if place.variable is None and is_module(obj):
            place = place._replace(holder=obj, variable=obj if op.type.convention == "variable" else None)

        def split(part: Any) -> Sequence[Any]:
            return parts_for(part, op, len(children), self._words.option, visit.keys)

        parts = self._parts.below(visit.spec, op.type.cls, len(children), visit.keys, split)
        visits: list[_Visit] = []
        for key, child, part in zip(op.keys, children, parts, strict=True):
            # What is in a variable is, to NNX, the variable.
            step = () if place.variable is not None else (step_of_path(key),)
            place_below = place._replace(path=(*place.path, *step))
            is_below_view = visit.is_below_view or op.type.is_view
            below = _Visit(child, (*visit.keys, key), place_below, part, is_below_view=is_below_view)
            # What a view is computed from is asked about at its own place, if it has one.
            visits.append(self._own_places.get(child, below) if is_below_view else below)
        return visits


def _joined(answers: Sequence[Any]) -> Any:
    """Returns one answer for all, if all have it; None is of what holds no leaf."""
    answers_of_leaves = [answer for answer in answers if answer is not None]
    if not answers_of_leaves:
        return None
    first = answers_of_leaves[0]
    if isinstance(first, bool) and all(answer is first for answer in answers_of_leaves):
        return first
    return branch_of(tuple([answer if answer is not None else False for answer in answers]))


def _answers_of_dag(dag: Dag[Any], spec: AnyFilter, name: str, above: Place, words: Words) -> list[bool]:
    """Returns the answer for each leaf of a `Dag`: each is one, whatever its paths."""
    answers: list[bool] = []
    of_leaves = list(ask(walked(dag.tree), spec, name, above, words=words).of_leaves.values())
    for asked in of_leaves:
        if len({question.answer for question in asked}) > 1:
            raise _selected_somewhere(asked, of_leaves, spec, name, words)
        answers.append(asked[0].answer)
    return answers


def _selected_somewhere(
    asked: Sequence[Asked], of_leaves: Sequence[Sequence[Asked]], spec: AnyFilter, name: str, words: Words
) -> InconsistentSharingError:
    treatments = [words.of(question.answer) for question in asked]
    texts = [name + jtu.keystr(question.keys) for question in asked]
    lines = [f"    `{text}` is {treatment}" for text, treatment in zip(texts, treatments, strict=True)]
    # The fix selects all leaves that are selected somewhere, so that the next call does not refuse another one.
    other_paths: list[tuple[Any, ...]] = []
    for questions in of_leaves if spec.asks_for_path else ():
        if any(question.answer for question in questions):
            other_paths.extend(question.path for question in questions if not question.answer)
    return InconsistentSharingError(
        "\n".join(
            [
                f"One leaf of a `Dag`, but `{words.option}` selects it at one path and not at another:",
                *lines[:MOST_PATHS],
                code_that_selects(other_paths, spec, words.option)
                + "A `Dag` has each leaf once. Select it at all of its paths, or make it several before:",
                "    dag = sharedtree.Dag(sharedtree.untie(dag.tree))",
            ]
        ),
        texts,
        treatments,
    )


def step_of_path(key: Any) -> Any:
    """Returns a step of a path as NNX writes it: an attribute's name, a key, an index."""
    for name in ("name", "key", "idx"):
        if hasattr(key, name):
            return getattr(key, name)
    return str(key)


def code_that_selects(
    paths: Sequence[tuple[Any, ...]], spec: AnyFilter, name: str = "wrt", brackets: str = "[]"
) -> str:
    """Lines of a message with a filter that selects these paths, too, empty if it could not be written down."""
    can_be_written = all(type(step) in (str, int) for path in paths for step in path)
    if isinstance(spec, FilterPrefix) or not 0 < len(paths) <= MOST_PATHS or not can_be_written:
        return ""
    begin, end = brackets
    return (
        "Select it at its other paths, too:\n"
        f"    {name} = {begin}{name}, lambda path, value: path in {list(paths)!r}{end}\n"
    )


def too_many_paths(option: str, text: str) -> ValueError:
    """Returns the error for a filter that looks at paths, of which there are too many to ask about each.

    Args:
        option: where the filter was given.
        text: what there are too many of, as in "10 paths lead to the leaves of the tree".
    """
    return ValueError(
        f"`{option}` looks at paths, and {text}.\n"
        "What is tied is selected at all of its paths or at none, so a function of a path is asked at each. A class, "
        "or a function of a leaf, is asked about each leaf once:\n"
        f"    {option} = lambda leaf: getattr(leaf, 'ndim', 0) > 1"
    )


def _num_paths(tree: FlatDag, leaves: Collection[int]) -> str:
    to_leaves: list[int] = []
    for number, (_, children) in enumerate(tree.records):
        to_leaves.append(1 if number in leaves else sum(to_leaves[child] for child in children))
    count = to_leaves[tree.root]
    number = f"{count:,}" if count < 10**15 else f"about 10**{len(str(count)) - 1}"
    return f"{number} paths lead to the leaves of the tree"


class PartsOfPrefix:
    """The filters that a tree prefix has at its nodes, each made once, so that what is shared is asked about once."""

    def __init__(self) -> None:
        # The keys are parts of the prefix, which are kept alive, and with them the filters, known by their addresses.
        self._parts: IdentityDict[FilterPrefix] = IdentityDict()
        self._filters: IdentityDict[Filter] = IdentityDict()

    def below(
        self, spec: AnyFilter, cls: type, num_children: int, keys: Path, split: Callable[[Any], Sequence[Any]]
    ) -> Sequence[AnyFilter]:
        """Returns the filter for each child of a node.

        Args:
            spec: the filter at the node.
            cls: the class of the node.
            num_children: of the node.
            keys: the path to it, for errors.
            split: part of a prefix → what it has for each child. Raises if it does not fit the node.
        """
        if isinstance(spec, Filter):
            return [spec] * num_children
        part, option = spec.tree, spec.option
        has_list = cls is type(part) and isinstance(part, (list, tuple)) and len(part) == num_children
        if is_one_filter(part) or (not has_list and is_several_where_no_list_is(part, option)):
            return [self._filter(spec)] * num_children
        if isinstance(part, str):
            raise _not_a_filter(part, keys, option)
        return [self._part(child_part, spec) for child_part in split(part)]

    def at_leaf(self, spec: AnyFilter, keys: Path) -> Filter:
        """Returns the filter for a leaf."""
        if isinstance(spec, Filter):
            return spec
        if is_one_filter(spec.tree) or is_several_where_no_list_is(spec.tree, spec.option):
            return self._filter(spec)
        raise _not_a_filter(spec.tree, keys, spec.option)

    def _part(self, part: Any, whole: FilterPrefix) -> FilterPrefix:
        if part not in self._parts:
            # If no filter in the whole looks at paths, nobody has to look for one in each part.
            no_paths = FilterPrefix(part, whole.option, asks_for_path=False)
            self._parts[part] = prefix_of(part, whole.option) if whole.asks_for_path else no_paths
        return self._parts[part]

    def _filter(self, spec: FilterPrefix) -> Filter:
        part, option = spec.tree, spec.option
        if part not in self._filters:
            self._filters[part] = one_filter(part, option) if is_one_filter(part) else any_of(part, option)
        return self._filters[part]


def _is_static(spec: FilterPrefix, op: Static) -> bool:
    """Tells whether a prefix has a static value where the tree has one, which nobody can have meant as a filter."""
    part = spec.tree
    if part is ... or isinstance(part, (bool, np.bool_)) or node_type_of(part) is not None:
        return False
    # A function may have been said for what is no function.
    return not callable(part) or callable(op.peek())


def _not_a_filter(part: Any, keys: Path, option: Option) -> SharingMismatchError:
    path, name = jtu.keystr(keys), option.name
    if callable(part):
        advice = f"If this is meant to be called, say so:\n    {name} = lambda leaf: spec(leaf)"
    elif isinstance(part, str):
        advice = (
            "A string in a tree may be a static value. A tag of NNX is there in a list:\n"
            f"    {name} = equinox.tree_at(lambda tree: tree{path}, {name}, [{part!r}])"
        )
    else:
        advice = "Write True or False there."
    return SharingMismatchError(
        f"`{name}` has a `{name_of_class(part)}` at `{path}`, where it must say what to select. It is made of booleans "
        f"and functions that take a leaf, in the nodes of the tree. {advice}",
        (path,),
    )


def _left_over(occurrences: Sequence[tuple[FilterPrefix, Path]]) -> SharingMismatchError:
    value, option, _ = occurrences[0][0]
    paths = [jtu.keystr(keys) for _, keys in occurrences]
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
