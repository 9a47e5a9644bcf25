"""Asks a filter about each leaf of a tree. The answers become a prefix of the tree, which says what is selected.

    Net(kernel=Param(k), mean=BatchStat(m), rest=[x, y])  under  nnx.Param      Branch(True, False, False)

If all leaves of a branch have one answer, that answer stands for the branch. So an object that is selected at one path
and not at another is treated as under `in_axes`: an array is split, a module is an error.

A filter that does not look at paths is asked about each record once, and equal branches are one object. So a tower of
sixty layers, each of which holds the next one twice, costs sixty steps. A function of a path is asked at each path.
The tower has 2^60 paths, so the number of such questions has a limit.

The user's specification (`spec`) is a `Filter`, which is asked about every leaf, or a `FilterPrefix`: a tree prefix
with a filter for each part of the tree. A *visit* is a record that was reached on one path, with the part of the prefix
that holds there.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import tree_util as jtu

from ..core._by_identity import IdentityDict
from ..core._errors import InconsistentSharingError, SharingMismatchError
from ..core._node_types import is_module, node_type_of
from ..core._pack_and_unpack import flat_dag_of
from ..core._prefix_trees import branch_of, prefixes_of_children
from ..core._printing import MOST_PATHS, listed, name_of_class, shown, where_argument
from ..core._static_values import Static
from ..core._structure import LEAF, FlatDag, Node, Path
from ._dag import Dag
from ._filters import (
    AnyFilter,
    Filter,
    FilterPrefix,
    LeafPlace,
    Option,
    any_of,
    is_one_filter,
    is_several_where_no_list_is,
    one_filter,
    prefix_of,
)

MOST_REPEATED_VISITS = 100_000
"""Limit on repeated visits of records, for filters that look at paths. It bounds the time to seconds."""


def selection(argument: Any, spec: AnyFilter, name: str) -> Any:
    """Returns the prefix of an argument that says which traced leaves a filter selects: True, False, or a `Branch`.

    Args:
        argument: the argument itself, not its packed leaves.
        spec: the filter.
        name: name of the argument in errors.

    Raises:
        InconsistentSharingError: if the filter selects a leaf of a `Dag` at one path and not at another.
        SharingMismatchError: if the filter is a tree prefix and does not fit the argument.
        ValueError: if the filter looks at paths, and the argument has too many of them.

    Cost: one question for each leaf. If the filter looks at paths, one question for each path.
    """
    # `flat_dag_of` takes the argument apart into records, with the object of each.
    return ask(flat_dag_of(argument), spec, name).prefix


class Asked(NamedTuple):
    """A filter's answer about a leaf at one of its paths.

    Attributes:
        keys: the path as JAX's key entries, for errors.
        path: the path as attribute names, keys and indices, as Flax NNX writes it. A filter gets this path.
        answer: True if the leaf is selected.
    """

    keys: Path
    path: tuple[Any, ...]
    answer: bool


class Answers(NamedTuple):
    """The answers of a filter about a tree.

    Attributes:
        prefix: True, False, or a `Branch` of such prefixes. Equal prefixes are one object.
        of_leaves: number of a leaf → the answers at its paths.
    """

    prefix: Any
    of_leaves: dict[int, list[Asked]]


class Words(NamedTuple):
    """Words for errors about an option that takes a filter.

    Attributes:
        option: name of the option.
        selected: adjective for a leaf that is selected.
        not_selected: adjective for a leaf that is not selected.
    """

    option: str
    selected: str
    not_selected: str

    def of(self, answer: bool) -> str:
        """Returns the adjective for a leaf about which the filter gave this answer."""
        return self.selected if answer else self.not_selected


IN_WRT = Words("wrt", "differentiated", "not differentiated")
IN_TREE = Words("filter_spec", "selected", "not selected")

ROOT = LeafPlace(path=(), leaf=None, variable=None, holder=None)
"""The place of the root of a tree, which nothing holds."""


def ask(
    tree: FlatDag,
    spec: AnyFilter,
    name: str = "",
    root_place: LeafPlace = ROOT,
    *,
    asks_static: bool = False,
    words: Words = IN_WRT,
) -> Answers:
    """Asks a filter about the leaves of a tree.

    Args:
        tree: the tree, with its objects.
        spec: the filter.
        name: name of the tree in errors.
        root_place: the place of the tree's root in a larger tree.
        asks_static: True to ask about static leaves, too. Otherwise they have no part in the answers.
        words: words for errors.

    Raises:
        InconsistentSharingError: if the filter selects a leaf of a `Dag` at one path and not at another.
        SharingMismatchError: if the filter is a tree prefix and does not fit the tree.
        ValueError: if the filter looks at paths, and the tree has too many of them.
    """
    return _Questions(tree, spec, name, words, asks_static=asks_static).asked_from(root_place)


class _FilterVisit(NamedTuple):
    """A record, reached on one path.

    Attributes:
        record: number of the record.
        keys: the path.
        place: the facts about the place that a filter may ask for.
        spec: the filter, or the part of a prefix of filters, that holds there.
        is_done: True once the answers of all children are known, so that the node's own answer can be made of them.
        is_below_view: True if the path leads through a view, a node that stands for an array computed from its leaves.
    """

    record: int
    keys: Path
    place: LeafPlace
    spec: AnyFilter
    is_done: bool = False
    is_below_view: bool = False


class _Questions:
    """A filter, and the answers that it has given about the leaves of a tree. The parameters are those of `ask`."""

    def __init__(self, tree: FlatDag, spec: AnyFilter, name: str, words: Words, *, asks_static: bool) -> None:
        """Prepares the questions. No leaf is asked about yet."""
        self._tree = tree
        self._spec = spec
        self._name = name
        self._words = words
        self._parts = PartsOfPrefix()
        # Number of a leaf → the answers about it, as in `Answers`.
        self._of_leaves: dict[int, list[Asked]] = {}
        for number, (op, _) in enumerate(tree.records):
            if op is LEAF or (asks_static and type(op) is Static):
                self._of_leaves[number] = []
        # (record, id of the variable, of the holder, of the filter) → answer, None for a record without leaves. `tree`
        # keeps the objects alive, and `_parts` the filters, so that no address is used again.
        self._answers: dict[tuple[int, int, int, int], Any] = {}
        # Static values that the prefix has at the same path as the tree: it was copied from the tree there.
        self._repeated_static: list[tuple[FilterPrefix, Path]] = []
        self._visited: set[int] = set()
        self._num_repeated = 0
        # Record → its first visit outside views. Empty if the tree has no views.
        self._visits_outside_views: dict[int, _FilterVisit] = {}

    def asked_from(self, root_place: LeafPlace) -> Answers:
        """Asks the filter about all leaves: once for each record, or for each path if the filter looks at paths.

        Args:
            root_place: the place of the tree's root in a larger tree.

        Raises:
            SharingMismatchError: if the prefix does not fit, or has static values that were copied from the tree.
        """
        root = _FilterVisit(self._tree.root, (), root_place, self._spec)
        if any(type(op) is Node and op.type.is_view for op, _ in self._tree.records):
            self._visits_outside_views = self._find_visits_outside_views(root)
        # Answers whose parents have none yet. The answers of a node's children are the last ones when the node is done.
        pending: list[Any] = []
        stack = [root]
        while stack:
            visit = stack.pop()
            # A key of `_answers`.
            key = visit.record, id(visit.place.variable), id(visit.place.holder), id(visit.spec)
            children = self._tree.records[visit.record][1]
            if not visit.spec.asks_for_path and key in self._answers:
                pending.append(self._answers[key])
                continue
            if visit.is_done:
                answer = _joined(pending[len(pending) - len(children) :])
                del pending[len(pending) - len(children) :]
            elif visit.record in self._of_leaves:
                answer = self._of_leaf(visit)
            elif not children:
                answer = None
            elif self._is_dag(visit):
                answer = self._of_dag(visit)
            else:
                # The node is visited again when its children, which are above it on the stack, have their answers.
                self._count(visit)
                stack.append(visit._replace(is_done=True))
                stack.extend(reversed(self._visits_of_children(visit)))
                continue
            self._answers[key] = answer
            pending.append(answer)
        if self._repeated_static:
            raise _static_values_in_prefix(self._repeated_static)
        # The last answer is that of the root. It is None if the tree has no leaves.
        return Answers(False if pending[0] is None else pending[0], self._of_leaves)

    def _find_visits_outside_views(self, root: _FilterVisit) -> dict[int, _FilterVisit]:
        """Finds the first visit of each record on paths that lead through no view."""
        first_visits: dict[int, _FilterVisit] = {}
        stack = [root]
        while stack:
            visit = stack.pop()
            if visit.record in first_visits:
                continue
            first_visits[visit.record] = visit
            op, children = self._tree.records[visit.record]
            if children and visit.record not in self._of_leaves and not self._is_dag(visit):
                assert type(op) is Node
                if not op.type.is_view:
                    stack.extend(reversed(self._visits_of_children(visit)))
        return first_visits

    def _count(self, visit: _FilterVisit) -> None:
        """Counts a visit of a node if the node was visited before.

        Raises:
            ValueError: if there were too many repeated visits, because the filter looks at paths.
        """
        if visit.record in self._visited:
            self._num_repeated += 1
        self._visited.add(visit.record)
        if self._num_repeated > MOST_REPEATED_VISITS:
            raise too_many_paths(self._words.option, _num_paths(self._tree, self._of_leaves))

    def _of_leaf(self, visit: _FilterVisit) -> bool | None:
        """Asks the filter about a leaf, and stores the answer.

        Returns:
            True if the leaf is selected. None if the prefix has a copy of a static leaf in its place: the error is
            raised at the end, so that it names all such leaves.

        Raises:
            SharingMismatchError: if the prefix has no filter at the leaf.
        """
        op, leaf = self._tree.records[visit.record][0], self._tree.objects[visit.record]
        if type(op) is Static and visit.keys and isinstance(visit.spec, FilterPrefix) and _is_copied(visit.spec, op):
            self._repeated_static.append((visit.spec, visit.keys))
            return None
        answer = self._parts.at_leaf(visit.spec, visit.keys).selects(visit.place._replace(leaf=leaf))
        self._of_leaves[visit.record].append(Asked(visit.keys, visit.place.path, answer))
        return answer

    def _is_dag(self, visit: _FilterVisit) -> bool:
        """Returns True if a record is a `Dag` and the prefix has no `Dag` in its place."""
        has_dag_in_prefix = isinstance(visit.spec, FilterPrefix) and isinstance(visit.spec.tree, Dag)
        return isinstance(self._tree.objects[visit.record], Dag) and not has_dag_in_prefix

    def _of_dag(self, visit: _FilterVisit) -> Any:
        """Asks the filter about the leaves of a `Dag`, at their paths in the Dag's model, and stores the answers.

        The record of the `Dag` itself has a flat list of leaves, whose paths mean nothing to the user.

        Returns:
            The answer for the record, as `_joined` makes it.
        """
        op, children = self._tree.records[visit.record]
        assert type(op) is Node
        dag = self._tree.objects[visit.record]
        place = visit.place._replace(holder=dag)
        answers = _answers_of_dag(dag, visit.spec, self._name + jtu.keystr(visit.keys), place, self._words)
        for key, child, answer in zip(op.keys, children, answers, strict=True):
            if child in self._of_leaves:
                self._of_leaves[child].append(Asked((*visit.keys, key), visit.place.path, answer))
        return _joined(answers)

    def _visits_of_children(self, visit: _FilterVisit) -> list[_FilterVisit]:
        """Makes the visits of a node's children, each with its place and its part of the prefix."""
        op, children = self._tree.records[visit.record]
        assert type(op) is Node
        obj, place = self._tree.objects[visit.record], visit.place
        # For the nodes in a variable of NNX, the variable remains the holder.
        if place.variable is None and is_module(obj):
            place = place._replace(holder=obj, variable=obj if op.type.convention == "variable" else None)

        def split(part: Any) -> Sequence[Any]:
            """Splits a part of the prefix into one part for each child. Raises if it does not fit the node."""
            return prefixes_of_children(part, op, len(children), self._words.option, visit.keys)

        is_below_view = visit.is_below_view or op.type.is_view
        # A None for a view holds for all below it.
        if is_below_view and has_no_answer(visit.spec):
            parts: Sequence[AnyFilter] = [visit.spec] * len(children)
        else:
            parts = self._parts.below(visit.spec, op.type.cls, len(children), visit.keys, split)
        visits: list[_FilterVisit] = []
        for key, child, part in zip(op.keys, children, parts, strict=True):
            # NNX's path of the array in a variable is the path of the variable.
            step = () if place.variable is not None else (step_of_path(key),)
            child_place = place._replace(path=(*place.path, *step))
            child_visit = _FilterVisit(child, (*visit.keys, key), child_place, part, is_below_view=is_below_view)
            visits.append(self._at_own_place(child_visit) if is_below_view else child_visit)
        return visits

    def _at_own_place(self, visit: _FilterVisit) -> _FilterVisit:
        """Returns the visit to ask about in place of one below a view.

        An array that a view is computed from may have a place of its own, outside views. A function is asked about the
        array at this place. So a rule by path that selects `embed.embedding` also selects `head.kernel.of[0]`, the same
        array. A tree of booleans may have another answer for the view than for the array. Then that answer counts, too,
        unless it is None.
        """
        own_visit = self._visits_outside_views.get(visit.record)
        if own_visit is None:
            return visit
        # Parts of a prefix that are one boolean or one function are one filter.
        has_answer_of_own = visit.spec is not own_visit.spec and not has_no_answer(visit.spec)
        return visit._replace(place=own_visit.place) if has_answer_of_own else own_visit


def has_no_answer(spec: AnyFilter) -> bool:
    """Returns True for a part of a prefix that is None."""
    return isinstance(spec, FilterPrefix) and spec.tree is None


def _joined(answers: Sequence[Any]) -> Any:
    """Joins the answers of a node's children to the answer of the node.

    Args:
        answers: True, False, a `Branch`, or None for a child without leaves.

    Returns:
        True or False if all children with leaves have that answer. None if no child has leaves. Else a `Branch`.
    """
    answers_of_leaves = [answer for answer in answers if answer is not None]
    if not answers_of_leaves:
        return None
    first = answers_of_leaves[0]
    if isinstance(first, bool) and all(answer is first for answer in answers_of_leaves):
        return first
    return branch_of(tuple([answer if answer is not None else False for answer in answers]))


def _answers_of_dag(dag: Dag[Any], spec: AnyFilter, name: str, place: LeafPlace, words: Words) -> list[bool]:
    """Asks a filter about the leaves of a `Dag`, at all paths in its model. Returns one answer for each leaf.

    Args:
        dag: the `Dag`.
        spec: the filter.
        name: name of the `Dag` in errors.
        place: the place of the `Dag`.
        words: words for errors.

    Raises:
        InconsistentSharingError: if a leaf is selected at one of its paths and not at another.
    """
    answers: list[bool] = []
    of_leaves = list(ask(flat_dag_of(dag.tree), spec, name, place, words=words).of_leaves.values())
    for questions in of_leaves:
        if len({question.answer for question in questions}) > 1:
            raise _selected_somewhere(questions, of_leaves, spec, name, words)
        answers.append(questions[0].answer)
    return answers


def _selected_somewhere(
    questions: Sequence[Asked], of_leaves: Sequence[Sequence[Asked]], spec: AnyFilter, name: str, words: Words
) -> InconsistentSharingError:
    """Makes the error for a leaf of a `Dag` that is selected at some of its paths only.

    Args:
        questions: the answers about the leaf.
        of_leaves: the answers about all leaves.
        spec: the filter.
        name: name of the `Dag` in errors.
        words: words for errors.
    """
    treatments = [words.of(question.answer) for question in questions]
    texts = [name + jtu.keystr(question.keys) for question in questions]
    lines = [f"    `{text}` is {treatment}" for text, treatment in zip(texts, treatments, strict=True)]
    # The fix selects all leaves that are selected somewhere, so that the next call does not refuse another one.
    other_paths: list[tuple[Any, ...]] = []
    for leaf_questions in of_leaves if spec.asks_for_path else ():
        if any(question.answer for question in leaf_questions):
            other_paths.extend(question.path for question in leaf_questions if not question.answer)
    # Untie at the fewer paths, so that the other ties remain.
    selected = [jtu.keystr(question.keys) for question in questions if question.answer]
    not_selected = [jtu.keystr(question.keys) for question in questions if not question.answer]
    where = where_argument([f"m{path}" for path in min(not_selected, selected, key=len)])
    return InconsistentSharingError(
        "\n".join(
            [
                f"`{words.option}` selects one leaf of a `Dag` at one path and not at another:",
                *lines[:MOST_PATHS],
                code_that_selects(other_paths, spec, words.option)
                + "A `Dag` has each leaf once. Select it at all of its paths, or untie it before:",
                f"    dag = sharedtree.Dag(sharedtree.untie(dag.tree{where}))",
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
    """Returns lines of an error: the user's filter, extended so that it also selects these paths.

    Args:
        paths: paths as Flax NNX writes them.
        spec: the user's filter.
        name: name of the user's filter in the code.
        brackets: the brackets of a list of filters in the code.

    Returns:
        The lines. Empty if the filter does not look at paths of this kind, or if there are no paths or too many.
    """
    can_be_written = all(type(step) in (str, int) for path in paths for step in path)
    if isinstance(spec, FilterPrefix) or not 0 < len(paths) <= MOST_PATHS or not can_be_written:
        return ""
    begin, end = brackets
    return (
        "Select it at its other paths, too:\n"
        f"    {name} = {begin}{name}, lambda path, value: path in {list(paths)!r}{end}\n"
    )


def too_many_paths(option: str, text: str) -> ValueError:
    """Returns the error for a filter that looks at paths, if a tree has too many paths to ask about each.

    Args:
        option: name of the parameter that takes the filter.
        text: a clause that counts the paths, such as "10 paths lead to the leaves of the tree".
    """
    return ValueError(
        f"`{option}` is a function of paths, and {text}.\n"
        "Such a function is called for every path. A class, or a function of a leaf, is asked about each leaf once:\n"
        f"    {option} = lambda leaf: getattr(leaf, 'ndim', 0) > 1"
    )


def _num_paths(tree: FlatDag, leaves: Collection[int]) -> str:
    """Returns a clause with the number of paths to leaves. Paths are counted, not walked, since there are too many."""
    # Record → number of paths from it to leaves. Children come before their parents.
    num_paths: list[int] = []
    for number, (_, children) in enumerate(tree.records):
        num_paths.append(1 if number in leaves else sum(num_paths[child] for child in children))
    count = num_paths[tree.root]
    number = f"{count:,}" if count < 10**15 else f"about 10**{len(str(count)) - 1}"
    return f"{number} paths lead to the leaves of the tree"


class PartsOfPrefix:
    """The filters in a tree prefix. Each part of the prefix is made a filter once.

    So two visits with the same part have the same filter object, and the answer for the first serves for the second.
    """

    def __init__(self) -> None:
        # Part of the prefix → filter. Entries keep both alive, because `_Questions` compares filters by their ids.
        self._parts: IdentityDict[FilterPrefix] = IdentityDict()
        self._filters: IdentityDict[Filter] = IdentityDict()

    def below(
        self, spec: AnyFilter, cls: type, num_children: int, keys: Path, split: Callable[[Any], Sequence[Any]]
    ) -> Sequence[AnyFilter]:
        """Returns one filter, or part of a prefix, for each child of a node.

        Args:
            spec: the filter, or the part of the prefix, at the node.
            cls: the class of the node.
            num_children: number of the node's children.
            keys: the path to the node, for errors.
            split: part of a prefix → one part for each child. Raises if the part does not fit the node.

        Raises:
            SharingMismatchError: if the prefix does not fit, or has a string, which is a filter in a list only.
        """
        if isinstance(spec, Filter):
            return [spec] * num_children
        part, option = spec.tree, spec.option
        # A list is ambiguous. It is a part of the prefix where the tree has a list of the same length, else a list of
        # filters.
        has_list = cls is type(part) and isinstance(part, (list, tuple)) and len(part) == num_children
        if is_one_filter(part) or (not has_list and is_several_where_no_list_is(part, option)):
            return [self._filter(spec)] * num_children
        if isinstance(part, str):
            raise _not_a_filter(part, keys, option)
        return [self._part(child_part, spec) for child_part in split(part)]

    def at_leaf(self, spec: AnyFilter, keys: Path) -> Filter:
        """Returns the filter for a leaf.

        Raises:
            SharingMismatchError: if the prefix has another object there.
        """
        if isinstance(spec, Filter):
            return spec
        if is_one_filter(spec.tree) or is_several_where_no_list_is(spec.tree, spec.option):
            return self._filter(spec)
        raise _not_a_filter(spec.tree, keys, spec.option)

    def _part(self, part: Any, parent: FilterPrefix) -> FilterPrefix:
        """Returns the prefix for a part of a larger prefix, the same object at each call."""
        if part not in self._parts:
            # If no filter in the parent looks at paths, its parts need no search for one.
            no_paths = FilterPrefix(part, parent.option, asks_for_path=False)
            self._parts[part] = prefix_of(part, parent.option) if parent.asks_for_path else no_paths
        return self._parts[part]

    def _filter(self, spec: FilterPrefix) -> Filter:
        """Returns the filter for a part of a prefix that is one filter or a list of filters. It is made once."""
        part, option = spec.tree, spec.option
        if part not in self._filters:
            self._filters[part] = one_filter(part, option) if is_one_filter(part) else any_of(part, option)
        return self._filters[part]


def _is_copied(spec: FilterPrefix, op: Static) -> bool:
    """Returns True if the part of a prefix at a static leaf can be no filter, so that it was copied from the tree."""
    part = spec.tree
    if part is ... or isinstance(part, (bool, np.bool_)) or node_type_of(part) is not None:
        return False
    # A function may be a filter, unless the static leaf is a function, too, such as `activation=relu`.
    return not callable(part) or callable(op.peek())


def _not_a_filter(part: Any, keys: Path, option: Option) -> SharingMismatchError:
    """Makes the error for a part of a prefix that is no filter at the path of a leaf."""
    path, name = jtu.keystr(keys), option.name
    if callable(part):
        advice = (
            "It is a part of the tree, although it can be called. To call it with each leaf, put it into a function:\n"
            f"    spec = {name}{path}\n"
            f"    {name} = equinox.tree_at(lambda tree: tree{path}, {name}, lambda leaf: spec(leaf))"
        )
    elif isinstance(part, str):
        advice = (
            "Inside a tree, a string counts as a static value. To select by a tag of NNX, put it into a list:\n"
            f"    {name} = equinox.tree_at(lambda tree: tree{path}, {name}, [{part!r}])"
        )
    else:
        advice = "Write True or False there."
    return SharingMismatchError(
        f"`{name}` has a `{name_of_class(part)}` at `{path}`, where it must have a boolean or a function that takes a "
        f"leaf. {advice}",
        (path,),
    )


def _static_values_in_prefix(occurrences: Sequence[tuple[FilterPrefix, Path]]) -> SharingMismatchError:
    """Makes the error for a prefix with static values that were copied from the tree.

    Args:
        occurrences: the part of the prefix and the path of each such value, at least one.
    """
    first_part, _ = occurrences[0]
    value, name = first_part.tree, first_part.option.name
    paths = [jtu.keystr(keys) for _, keys in occurrences]
    return SharingMismatchError(
        f"`{name}` has {shown(value)} at {listed(paths)}, where the tree has a static value and the specification "
        "must have a boolean.\n"
        "`sharedtree.tree.map` keeps static values. Begin with a specification that has a boolean at every leaf:\n"
        f"    {name} = sharedtree.tree.filter(model, False, replace=False)\n"
        "Or replace the static values in this one:\n"
        f"    {name} = sharedtree.tree.filter({name}, lambda leaf: isinstance(leaf, bool), replace=False)",
        paths,
    )
