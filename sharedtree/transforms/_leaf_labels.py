"""Labels: what a transform does with each leaf of a tree at each of its paths, and objects with conflicting labels.

The caller writes labels as a prefix tree (`in_axes`, `in_shardings`), or there is one for each argument ("donated"). A
label belongs to an edge of the DAG and holds for everything below that edge, so one object may be reached under several
labels. A *record* is the number of an object in the flat DAG. A *visit* is a record together with the part of the
prefix under which it is reached.

The *outcome* of an object is what the labels come to for it. For a traced leaf it is the resolved label: for the label
`-1` it is axis 1, if the leaf has two axes. For a node it is the tuple of its children's outcomes. An object without
traced leaves has no outcome. An object has a *conflict* if it is reached with two different outcomes. The labels `1`
and `-1` make no conflict if they resolve to the same axis.

    Pair(w, [w])  under  Pair(0, 1)        w has the outcomes 0 and 1, the list has (1,), the Pair has (0, (1,))

Outcomes are stored as integers. As nested tuples they would be as large as the unfolded tree.

A *view* is an object that is computed from an array, such as the transpose of a weight. If the array also occurs in the
same argument outside of views, a label None on the way through the view is that of the first such place. Every other
label counts, as at each place of a plain tie.

The end of the file has the error for a conflict that is refused. A DAG of depth 60 can have 2^60 paths to one leaf. So
only edges that lead to the leaf are followed, and the error names at most the first eight paths of each treatment.
"""

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
from jax import tree_util as jtu

from ..core._by_identity import IdentityDict, IdentitySet
from ..core._call_arguments import Arguments, LeafPath
from ..core._errors import InconsistentSharingError, SharingMismatchError
from ..core._node_types import node_type_of
from ..core._prefix_trees import Branch, labels, parts_that_fit, raise_prefix_mismatch
from ..core._printing import code_that_unties, listed
from ..core._structure import LEAF, FlatDag, Node, Path

NO_OUTCOME = 0
"""The outcome of an object that holds no traced leaf."""

SPLIT, SPLIT_WITH_WARNING, REFUSED = "split", "split with a warning", "refused"
"""What happens to an array that has two outcomes within one module. In a result, this holds for any object."""

DONATED, KEPT = "donated", "not donated"
"""The two labels under donation: `DONATED` if the transform takes over the buffer of a leaf, otherwise `KEPT`."""


MAX_PATHS = 8
"""Number of paths of each treatment that an error names."""


def is_donated(group_labels: Sequence[Any]) -> bool:
    """Returns True if the leaves of a group are donated.

    Args:
        group_labels: labels of the group, one for each treatment.
    """
    return any(label is DONATED for label in group_labels)


class Visit(NamedTuple):
    """A record, together with the part of the prefix under which it is reached.

    Attributes:
        record: the record.
        part: number of the part, as counted by `Outcomes`.
    """

    record: int
    part: int


class Piece(NamedTuple):
    """A record with one of its outcomes. If a record with a conflict is split, each piece becomes an object of its own.

    Attributes:
        record: the record.
        outcome: number of the outcome, as counted by `Outcomes`.
    """

    record: int
    outcome: int


# Defaults of three fields of `Treatment`.


def _label_as_written(label: Any, leaf: Any, record: int) -> Any:
    return label


def _no_advice(leaves: Sequence[Any]) -> str:
    return ""


def _no_modules(outcomes: "Outcomes") -> Collection[int]:
    return ()


class Treatment(NamedTuple):
    """The labels that a transform gives to the leaves of a tree.

    Attributes:
        name: name of the option that holds the prefix, such as `in_axes`.
        prefix: a label, or a prefix tree of labels.
        is_label: returns True for an object in the prefix that is a label.
        resolve: (label, leaf, record of the leaf) → the resolved label, which is the outcome of that leaf. Resolved
            labels are compared by type and value.
        describe: resolved label → words for errors.
        groups_by_outcome: True to group leaves by their resolved labels, False to group them by the labels as written.
        is_transform_known: False if nothing is known of the transform. The labels are then only the names of the
            arguments, and `explain` does not print them.
        advice: (leaves with conflicts) → lines of an error before its fix. May be empty.
        splittable_modules: (outcomes) → records of the modules that may be split, as arrays are. A conflict of any
            other module is an error.
        within_module: what happens to an array that has two outcomes within one module: `SPLIT`, `SPLIT_WITH_WARNING`
            or `REFUSED`. In a result, this holds for any object.
        has_containers: True if mutable containers outside modules carry identity, so that they count as modules do.
    """

    name: str
    prefix: Any
    is_label: Callable[[Any], bool] = lambda _: True
    resolve: Callable[[Any, Any, int], Any] = _label_as_written
    describe: Callable[[Any], str] = str
    groups_by_outcome: bool = False
    is_transform_known: bool = True
    advice: Callable[[Sequence[Any]], str] = _no_advice
    splittable_modules: Callable[["Outcomes"], Collection[int]] = _no_modules
    within_module: str = SPLIT
    has_containers: bool = False


class Outcomes:
    """Outcomes of every object in a tree under one treatment. `outcomes[visit]` is the number of a visit's outcome.

    Cost: one step for each visit. There are at most as many as records times parts of the prefix.

    Args:
        tree: the tree, with its objects.
        treatment: what the transform does with the tree.

    Attributes:
        leaf_outcomes: number of an outcome → the resolved label. It has the outcomes of leaves only.
        root: the visit of the root, under the whole prefix.

    Raises:
        SharingMismatchError: if the prefix has a node of another class than the tree.
    """

    def __init__(self, tree: FlatDag, treatment: Treatment) -> None:
        """Computes all outcomes."""
        self.tree = tree
        self.treatment = treatment
        # The distinct parts of the prefix. For example `(0, None)` has the parts `(0, None)`, `0` and `None`.
        # `Visit.part` is an index of this list.
        self._parts: list[Any] = []
        # Indices of the parts that are labels.
        self._label_numbers: list[int] = []
        # Object in the prefix → index of its part.
        self._part_numbers: IdentityDict[int] = IdentityDict()
        self._children: dict[Visit, list[Visit]] = {}
        # Visit → number of its outcome, children before their parents.
        self._outcomes: dict[Visit, int] = {}
        # Numbers of the children's outcomes → number of the node's outcome.
        self._node_outcomes: dict[tuple[int, ...], int] = {}
        # Numbers in use. There is one from the beginning: `NO_OUTCOME`.
        self._num_outcomes = 1
        self.leaf_outcomes: dict[int, Any] = {}
        self.root = Visit(tree.root, self._part_number(treatment.prefix))
        # Visit at or below a view → for the same argument: record that occurs outside of views → its first visit there.
        self._own_places: dict[Visit, dict[int, Visit]] = {}
        if any(type(op) is Node and op.type.is_view for op, _ in tree.records):
            self._find_own_places()
        self._visit_all_from_root()

    def with_objects(self, objects: Sequence[Any]) -> "Outcomes":
        """Returns a copy for a tree of the same structure with other objects. The outcomes are not computed again.

        Functions of the treatment may refer to a call. The copy has defaults in their place.

        Args:
            objects: object of each record. If empty, the copy keeps nothing of a call alive, so that it can be cached.
        """
        twin = copy.copy(self)
        twin.tree = FlatDag(self.tree.records, self.tree.root, objects)
        twin.treatment = self.treatment._replace(
            resolve=_label_as_written, advice=_no_advice, splittable_modules=_no_modules
        )
        return twin

    def __getitem__(self, visit: Visit) -> int:
        return self._outcomes[visit]

    def visits(self) -> Iterable[Visit]:
        """Iterates over all visits, children before their parents."""
        return self._outcomes

    def conflicts(self) -> dict[int, list[Visit]]:
        """Returns a dictionary: record with more than one outcome → one visit for each of its outcomes."""
        visits_of: dict[int, list[Visit]] = {}
        for piece, visit in self.first_visits().items():
            visits_of.setdefault(piece.record, []).append(visit)
        return {record: visits for record, visits in visits_of.items() if len(visits) > 1}

    def first_visits(self) -> dict[Piece, Visit]:
        """Returns a dictionary: piece → the first visit that reaches its record with its outcome."""
        visit_of: dict[Piece, Visit] = {}
        for visit, outcome in self._outcomes.items():
            visit_of.setdefault(Piece(visit.record, outcome), visit)
        return visit_of

    def reachable_from(self, root: Visit) -> set[Visit]:
        """Returns a visit and all visits below it."""
        reachable: set[Visit] = set()
        stack = [root]
        while stack:
            visit = stack.pop()
            if visit not in reachable:
                reachable.add(visit)
                stack.extend(self.children(visit))
        return reachable

    def children(self, visit: Visit) -> list[Visit]:
        """Returns the visits of the children of a record, in order. Empty for a leaf or a static value."""
        children = self._children.get(visit)
        if children is None:
            children = self._find_children(visit)
            # Below a view, replace each visit under None if its record also occurs outside of views.
            own_places = self._own_places.get(visit)
            if own_places is not None:
                children = [self._with_label_of_own_place(child, own_places) for child in children]
            self._children[visit] = children
        return children

    def group_label(self, visit: Visit) -> Any:
        """Returns the label of the leaf group into which a leaf goes.

        It is the resolved label if the treatment groups by outcome. Otherwise it is the label as it was written.
        """
        return self.outcome_of_leaf(visit) if self.treatment.groups_by_outcome else self._parts[visit.part]

    def prefix_at(self, visit: Visit) -> Any:
        """Returns the part of the prefix under which a visit reaches its record."""
        return self._parts[visit.part]

    def outcome_of_leaf(self, visit: Visit) -> Any:
        """Returns the resolved label of a leaf. Indexing with the visit returns only the number of this outcome."""
        return self.leaf_outcomes[self._outcomes[visit]]

    def description(self, visit: Visit) -> str:
        """Describes in words what the transform does with a leaf."""
        return self.treatment.describe(self.outcome_of_leaf(visit))

    def descriptions_below(self, visit: Visit) -> set[str]:
        """Describes in words what the transform does with the leaves below a visit."""
        descriptions: set[str] = set()
        for reached in self.reachable_from(visit):
            if self.tree.records[reached.record][0] is LEAF:
                descriptions.add(self.description(reached))
        return descriptions

    def _part_number(self, part: Any) -> int:
        """Returns the number of a part of the prefix. A new part gets the next number.

        A label that equals an earlier label gets the number of that label.
        """
        number = self._part_numbers.get(part)
        if number is not None:
            return number
        number = len(self._parts)
        is_label = self.treatment.is_label(part)
        if is_label:
            # Equal labels get one number, so that a record under both is visited once.
            number = next((i for i in self._label_numbers if is_same_label(self._parts[i], part)), number)
        # No earlier part has this number, so the part is new.
        if number == len(self._parts):
            self._parts.append(part)
            if is_label:
                self._label_numbers.append(number)
        self._part_numbers[part] = number
        return number

    def _find_children(self, visit: Visit) -> list[Visit]:
        """Returns the visits of the children of a record, each under its part of the prefix."""
        node = self.tree.node(visit.record)
        if node is None:
            return []
        children = self.tree.records[visit.record][1]
        part = self._parts[visit.part]
        # A `Branch` was made by the package, so it fits.
        if type(part) is Branch:
            subparts: Sequence[Any] = part.parts
        elif self.treatment.is_label(part):
            # A label holds for everything below it.
            return [Visit(child, visit.part) for child in children]
        else:
            # The user wrote a node here.
            fitting_parts = parts_that_fit(part, node, len(children))
            if fitting_parts is None:
                self._raise_unfit()
            subparts = fitting_parts
        children_with_parts = zip(children, subparts, strict=True)
        return [Visit(child, self._part_number(subpart)) for child, subpart in children_with_parts]

    def _find_own_places(self) -> None:
        """Fills `_own_places`: walks each argument by itself, and does not enter views."""
        node = self.tree.node(self.tree.root)
        is_call = node is not None and node.type.cls is Arguments
        for root in self.children(self.root) if is_call else [self.root]:
            # Record → its first visit in this argument outside of views. All views of the argument share it.
            first_visits: dict[int, Visit] = {}
            visited: set[Visit] = set()
            stack = [root]
            while stack:
                visit = stack.pop()
                if visit in visited:
                    continue
                visited.add(visit)
                first_visits.setdefault(visit.record, visit)
                node = self.tree.node(visit.record)
                if node is not None and node.type.is_view:
                    self._own_places.setdefault(visit, first_visits)
                else:
                    stack.extend(reversed(self.children(visit)))

    def _with_label_of_own_place(self, visit: Visit, own_places: dict[int, Visit]) -> Visit:
        """Returns the visit that gives a record below a view its label.

        Args:
            visit: a visit below a view.
            own_places: record that occurs outside of views → its first visit there.
        """
        own_visit = own_places.get(visit.record)
        part = self._parts[visit.part]
        if own_visit is not None and part is None and self.treatment.is_label(part):
            return own_visit
        # Its children are below the view, too.
        self._own_places.setdefault(visit, own_places)
        return visit

    def _raise_unfit(self) -> NoReturn:
        """Raises the error for a prefix that does not fit the tree.

        Visits have no paths. So `labels` reads the prefix once more, and raises the error with the path.

        Raises:
            SharingMismatchError: always. Its `concerns_modules` is True if the tree holds a module. Otherwise a caller
                may let JAX raise its own error.
        """
        treatment, tree = self.treatment, self.tree
        try:
            for entry in labels(treatment.prefix, tree, treatment.is_label, treatment.name):
                if tree.records[entry.record][0] is LEAF and not treatment.is_label(entry.label):
                    raise_prefix_mismatch(treatment.name, entry.label, "a leaf", entry.path)
        except SharingMismatchError as error:
            nodes = [tree.node(record) for record in range(len(tree.records))]
            error.concerns_modules = any(node is not None and not node.type.is_plain for node in nodes)
            raise
        raise AssertionError("one of the two readings of a prefix is wrong")

    def _visit_all_from_root(self) -> None:
        """Computes the outcomes of all visits, children first. It does not recurse, since a model may be too deep."""
        # A visit is taken off the stack when all of its children have outcomes. Until then they are pushed above it.
        stack = [self.root]
        while stack:
            visit = stack[-1]
            is_done = visit in self._outcomes
            missing = () if is_done else [child for child in self.children(visit) if child not in self._outcomes]
            if missing:
                stack.extend(missing)
                continue
            stack.pop()
            if not is_done:
                self._outcomes[visit] = self._outcome_of(visit)

    def _outcome_of(self, visit: Visit) -> int:
        """Returns the number of a visit's outcome. The children must have their outcomes already."""
        if self.tree.records[visit.record][0] is LEAF:
            return self._outcome_of_leaf(visit)
        outcomes = tuple([self._outcomes[child] for child in self.children(visit)])
        # All are `NO_OUTCOME`, which is 0: there is no traced leaf below.
        if not any(outcomes):
            return NO_OUTCOME
        number = self._node_outcomes.get(outcomes)
        if number is None:
            number = self._node_outcomes[outcomes] = self._new_outcome()
        return number

    def _outcome_of_leaf(self, visit: Visit) -> int:
        """Returns the number of a leaf's outcome. Leaves with the same resolved label have the same number.

        Raises:
            SharingMismatchError: if the prefix has a node where the tree has the leaf.
        """
        label = self._parts[visit.part]
        if not self.treatment.is_label(label):
            self._raise_unfit()
        resolved = self.treatment.resolve(label, self.tree.objects[visit.record], visit.record)
        # Resolved labels need not be hashable, and there are few of them.
        for number, outcome in self.leaf_outcomes.items():
            if is_same_label(outcome, resolved):
                return number
        number = self._new_outcome()
        self.leaf_outcomes[number] = resolved
        return number

    def _new_outcome(self) -> int:
        """Returns the next free number for an outcome."""
        self._num_outcomes += 1
        return self._num_outcomes - 1


def is_same_label(a: Any, b: Any) -> bool:
    """Returns True if two labels are one object, or equal and of one type. So `True` and `1` are different labels."""
    return a is b or (type(a) is type(b) and bool(a == b))


def distinct_labels(all_labels: Iterable[Any]) -> list[Any]:
    """Returns labels without repetitions, in order. They may be unhashable, so each is compared with earlier ones."""
    distinct: list[Any] = []
    for label in all_labels:
        if not any(is_same_label(label, earlier) for earlier in distinct):
            distinct.append(label)
    return distinct


def labels_in(prefix: Any, is_label: Callable[[Any], bool]) -> list[Any]:
    """Collects the distinct labels of a prefix tree in flatten order.

    An object that is neither a label nor a node is collected, too. `Outcomes` raises an error for it later.

    Args:
        prefix: the prefix tree.
        is_label: returns True for an object in the prefix that is a label.
    """
    collected: list[Any] = []
    # Each node is entered once: a prefix may share its nodes, with exponentially many paths to one of them.
    visited = IdentitySet()
    stack = [prefix]
    while stack:
        part = stack.pop()
        node_type = None if type(part) is Branch or is_label(part) else node_type_of(part)
        if type(part) is Branch or node_type is not None:
            if visited.add(part):
                parts = part.parts if node_type is None else node_type.take_apart(part)[0]
                stack.extend(reversed(parts))
        else:
            collected.append(part)
    return distinct_labels(collected)


# ---- The error for a conflict ----


def raise_inconsistent(outcomes: Outcomes, record: int, transform: str, reason: str = "") -> NoReturn:
    """Raises an `InconsistentSharingError` for a record that has a conflict, with the paths of one leaf below it.

    Args:
        outcomes: outcomes of every record.
        record: the record, which has two outcomes.
        transform: name of the transform.
        reason: why the conflict is refused, as whole lines. Empty for the usual reason.
    """
    obj, leaf = outcomes.tree.objects[record], _leaf_with_conflict(outcomes, record)
    # The usual reason for a module or a container. An array or a reference needs no reason, nor does a transform of
    # which nothing is known, whose advice has one.
    is_node = not isinstance(obj, jax.Ref) and outcomes.tree.node(record) is not None
    if not reason and is_node and outcomes.treatment.is_transform_known:
        reason = f"It is part of a shared `{type(obj).__name__}`, which would become two objects.\n"
    advice = reason + outcomes.treatment.advice(_leaves_below(outcomes, record))
    raise inconsistent_sharing_error(find_occurrences(outcomes, leaf), outcomes.treatment, transform, advice)


def raise_inconsistent_result(outcomes: Outcomes, record: int, transform: str) -> NoReturn:
    """Raises an `InconsistentSharingError` for a record that has a conflict in the result of a function.

    The paths in the error begin with "result". The fix in it is for the function, and not for its caller.
    """
    occurrences = find_occurrences(outcomes, _leaf_with_conflict(outcomes, record))
    in_result: list[Occurrence] = []
    for occurrence in occurrences.first_occurrences:
        path = (LeafPath("result"), *occurrence.path)
        in_result.append(Occurrence(path, occurrence.treatment))
    # This error has no fix for the arguments, so it needs no names of arguments.
    occurrences = Occurrences(in_result, occurrences.truncated, arguments=[])
    advice = outcomes.treatment.advice(_leaves_below(outcomes, record))
    text = (
        f"{_first_lines(occurrences, outcomes.treatment, transform)}\n{advice}"
        "Or let the function give each path an array of its own before it returns:\n"
        f"{_code_that_unties(occurrences)}"
    )
    raise InconsistentSharingError(text, occurrences.paths, occurrences.treatments)


class Occurrence(NamedTuple):
    """One path of a leaf, and what the transform does with the leaf there.

    Attributes:
        path: the path. In a call, it begins with the argument.
        treatment: what the transform does with the leaf at this path, in words.
    """

    path: Path
    treatment: str


class Occurrences(NamedTuple):
    """The paths of a leaf, and its treatments there, in words.

    Attributes:
        first_occurrences: the first `MAX_PATHS` occurrences of each treatment, in flatten order.
        truncated: treatments that have further occurrences, which are not listed.
        arguments: for each treatment, names of the arguments in which the leaf has it, such as `[["a"], ["b"]]`.
    """

    first_occurrences: list[Occurrence]
    truncated: list[str]
    arguments: list[list[str]]

    @property
    def paths(self) -> list[str]:
        """The paths as errors print them."""
        return [jtu.keystr(occurrence.path) for occurrence in self.first_occurrences]

    @property
    def treatments(self) -> list[str]:
        """The treatment at each path, in words."""
        return [occurrence.treatment for occurrence in self.first_occurrences]

    @property
    def lines(self) -> list[str]:
        """Lines of a message: one for each treatment, with the paths of the leaf under it."""
        paths_by_treatment: dict[str, list[str]] = {}
        for path, treatment in zip(self.paths, self.treatments, strict=True):
            paths_by_treatment.setdefault(treatment, []).append(f"`{path}`")
        lines: list[str] = []
        for treatment, paths in paths_by_treatment.items():
            paths += ["… and more"] * (treatment in self.truncated)
            lines.append(f"    {', '.join(paths)}: {treatment}")
        return lines


def find_occurrences(outcomes: Outcomes, leaf: int) -> Occurrences:
    """Finds the paths of a leaf, and what the transform does with the leaf at each of them.

    Cost: linear in the visits, plus the length of the named paths.

    Args:
        outcomes: outcomes of every record.
        leaf: record of the leaf.
    """
    treatments_below = _treatments_below(outcomes, leaf)
    # Treatment → number of its paths so far. A treatment is full if more than `MAX_PATHS` were found.
    counts: dict[str, int] = {}
    first_occurrences: list[Occurrence] = []
    full: set[str] = set()
    stack: list[tuple[Visit, Path]] = [(outcomes.root, ())]
    while stack:
        visit, path = stack.pop()
        # Give up a path that does not lead to the leaf, or only to full treatments. So few paths are followed, even if
        # there are exponentially many. An empty set of treatments is a subset of every set.
        if treatments_below[visit] <= full:
            continue
        if visit.record == leaf:
            treatment = outcomes.description(visit)
            counts[treatment] = counts.get(treatment, 0) + 1
            if counts[treatment] <= MAX_PATHS:
                first_occurrences.append(Occurrence(path, treatment))
            else:
                full.add(treatment)
            continue
        node = outcomes.tree.node(visit.record)
        assert node is not None
        children = list(zip(node.keys, outcomes.children(visit), strict=True))
        stack.extend([(child, (*path, key)) for key, child in reversed(children)])
    arguments = _arguments_by_treatment(outcomes, treatments_below, list(counts))
    return Occurrences(first_occurrences, [treatment for treatment in counts if treatment in full], arguments)


def _treatments_below(outcomes: Outcomes, leaf: int) -> dict[Visit, frozenset[str]]:
    """Returns, for each visit, what the transform does with one leaf on the paths through that visit, in words.

    The set of a visit is empty if no path leads from there to the leaf.

    Args:
        outcomes: outcomes of every record.
        leaf: record of the leaf.
    """
    treatments: dict[Visit, frozenset[str]] = {}
    # Children come before their parents.
    for visit in outcomes.visits():
        here = {outcomes.description(visit)} if visit.record == leaf else set[str]()
        treatments[visit] = frozenset(here.union(*[treatments[child] for child in outcomes.children(visit)]))
    return treatments


def _arguments_by_treatment(
    outcomes: Outcomes, treatments_below: Mapping[Visit, frozenset[str]], treatments: list[str]
) -> list[list[str]]:
    """Returns, for each treatment of a leaf, the names of the arguments in which the leaf has it.

    Args:
        outcomes: outcomes of every record.
        treatments_below: see `_treatments_below`.
        treatments: the treatments of the leaf, in words.
    """
    root = outcomes.tree.node(outcomes.root.record)
    assert root is not None
    arguments: list[list[str]] = [[] for _ in treatments]
    for key, child in zip(root.keys, outcomes.children(outcomes.root), strict=True):
        for names, treatment in zip(arguments, treatments, strict=True):
            if treatment in treatments_below[child]:
                names.append(str(key))
    return arguments


def _leaf_with_conflict(outcomes: Outcomes, record: int) -> int:
    """Returns the record of a leaf with a conflict, at or below a record with a conflict."""
    first, second, *_ = outcomes.conflicts()[record]
    # A node's outcome is the tuple of its children's outcomes. So if two visits of a node have different outcomes, the
    # visits of one of its children have, too. Go down to that child.
    while outcomes.tree.records[first.record][0] is not LEAF:
        pairs = zip(outcomes.children(first), outcomes.children(second), strict=True)
        first, second = next((a, b) for a, b in pairs if outcomes[a] != outcomes[b])
    return first.record


def _leaves_below(outcomes: Outcomes, record: int) -> list[Any]:
    """Returns the leaves at or below a record that has a conflict, each once."""
    tree = outcomes.tree
    # Every visit of the record reaches all leaves below it, so the first visit is enough.
    visit = outcomes.conflicts()[record][0]
    records = dict.fromkeys(reached.record for reached in sorted(outcomes.reachable_from(visit)))
    return [tree.objects[number] for number in records if tree.records[number][0] is LEAF]


def _first_lines(occurrences: Occurrences, treatment: Treatment, transform: str) -> str:
    """Returns the first lines of an error for a conflict: what is wrong, and the paths."""
    # The first path under each treatment.
    path_of = {
        occurrence.treatment: jtu.keystr(occurrence.path) for occurrence in reversed(occurrences.first_occurrences)
    }
    paths = [path_of[treatment] for treatment in dict.fromkeys(occurrences.treatments)]
    verb = "would" if treatment.is_transform_known else "may"
    return "\n".join(
        [f"{listed(paths)} are one leaf, but `{transform}` {verb} treat it differently there:", *occurrences.lines]
    )


def inconsistent_sharing_error(
    occurrences: Occurrences, treatment: Treatment, transform: str, advice: str
) -> InconsistentSharingError:
    """Makes the error for a leaf that would be treated in several ways.

    Args:
        occurrences: where the leaf is, and its treatments there.
        treatment: the labels that give it these treatments.
        transform: name of the transform.
        advice: whole lines to print before the usual fix. May be empty.
    """
    text = f"{_first_lines(occurrences, treatment, transform)}\n{advice}{_fix(occurrences)}"
    return InconsistentSharingError(text, occurrences.paths, occurrences.treatments)


def _fix(occurrences: Occurrences) -> str:
    """Returns a fix as text and code: an object of its own for each treatment.

    the leaf is in `a` under one treatment, and in `b` under another       b = sharedtree.copy(b)
    the leaf is in `a` under both treatments                 a = sharedtree.untie(a, lambda m: m.head.weight)
    """
    # For each treatment, names of the arguments in which the leaf has it.
    groups = occurrences.arguments
    arguments = list(dict.fromkeys(name for group in groups for name in group))
    targets = ", ".join(arguments)
    # An argument occurs in two groups: it holds the leaf under two treatments. A copy would hold it so, too, since a
    # copy keeps ties.
    if sum(map(len, groups)) > len(arguments):
        advice = "Change the option so that all paths agree, or untie them before the call:"
        return f"{advice}\n{_code_that_unties(occurrences)}"
    lines = ["Change the options so that all paths agree, or pass copies:"]
    if len(arguments) == 2:
        lines = [
            "Change the options so that all paths agree, or pass a copy, of the whole argument or of the shared part "
            "only:"
        ]
    # The arguments of the first treatment keep the object. Those of each other treatment get a copy.
    for group in groups[1:]:
        names = ", ".join(group)
        lines.append(f"    {names} = sharedtree.copy({f'({names})' if len(group) > 1 else names})")
    if len(arguments) == 2:
        lines.append(f"    {targets} = sharedtree.untie(({targets}), lambda t: t[1:])")
    return "\n".join(lines)


def _code_that_unties(occurrences: Occurrences) -> str:
    """Returns code that separates the treatments of a leaf, and keeps all other ties of the tree."""
    paths_by_treatment: dict[str, list[str]] = {}
    for path, treatment in zip(occurrences.paths, occurrences.treatments, strict=True):
        paths_by_treatment.setdefault(treatment, []).append(path)
    # Each separated path gets an object of its own, so the treatment with the most paths keeps the leaf.
    kept, *separated = sorted(paths_by_treatment.values(), key=len, reverse=True)
    return code_that_unties(kept[0], [path for paths in separated for path in paths])
