"""The leaves that `state(model, keep=...)` keeps, if the filter is more than a function of a leaf.

A state has more leaves than a tree: static attributes, and the results of functions from `register_state`. So a filter
is asked about the parts of *forms*, and not about the records of a packed tree. The form of an object lists its parts,
children and static attributes; see `_state_forms`.

A *view* is a node for an array that is computed from others. If an object below a view is also elsewhere, a function is
asked about that place only, its *own* place. A tree of filters may have another answer for the view, which then counts.

    Linear(weight=w, name="out")   under  lambda path, value: path[-1] == "name"    {"weight": (), "name": "out"}
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax import tree_util as jtu

from ...core._by_identity import IdentityDict
from ...core._errors import InconsistentSharingError
from ...core._node_types import carries_identity, is_module, node_type_of
from ...core._prefix_trees import raise_prefix_mismatch
from ...core._structure import Path
from .._asking_filters import MOST_REPEATED_VISITS, ROOT, PartsOfPrefix, has_no_answer, step_of_path, too_many_paths
from .._filters import AnyFilter, LeafPlace, Option, is_one_filter
from ._state_forms import Form, form_of, is_state_leaf

OF_STATE = Option("keep", "sharedtree.state(model, keep=", "leaf")
"""The parameter `keep`. A function that accepts one argument and two gets the leaf."""


class _Occurrence(NamedTuple):
    """An object at one of its paths, and the filter for it.

    Attributes:
        obj: the object.
        keys: the path as key entries, for errors.
        place: data for the filter: the path as names and indices, the variable and the module that hold the object.
        spec: the filter, or the part of a tree prefix of filters that belongs here.
        is_below_view: True if the path leads through a view.
    """

    obj: Any
    keys: Path
    place: LeafPlace
    spec: AnyFilter
    is_below_view: bool = False


class _Answer(NamedTuple):
    """The first answer about a leaf.

    Attributes:
        is_kept: True if the filter selected it.
        keys: the path at which the filter was asked.
    """

    is_kept: bool
    keys: Path


class KeptLeaves:
    """The answers of a filter about all leaves of a tree. The key of a leaf is the object that holds it, and its index.

    Args:
        tree: the model.
        forms: object → form, for each object of the tree. None for an object without parts. The map must keep the
            objects alive, because the answers are stored by `id`.
        spec: the filter.

    Raises:
        InconsistentSharingError: if the filter selects one leaf at one of its paths and not at another.
        SharingMismatchError: if a tree prefix does not fit the model.
        ValueError: if the filter looks at paths, and there are too many.
    """

    def __init__(self, tree: Any, forms: IdentityDict[Form | None], spec: AnyFilter) -> None:
        """Asks the filter about all leaves."""
        self._forms = forms
        self._parts = PartsOfPrefix()
        # (Id of the holder, index of the leaf in it) → answer.
        self._answers: dict[tuple[int, int], _Answer] = {}
        # Array → answer. Two objects may hold one array, so that the map above has it twice.
        self._answers_of_arrays: IdentityDict[_Answer] = IdentityDict()
        # Object → its first occurrence outside views.
        self._own_places: IdentityDict[_Occurrence] = IdentityDict()
        root = _Occurrence(tree, (), ROOT, spec)
        if forms[tree] is None:
            # A tree that is a leaf has no holder.
            self._ask_about((id(None), 0), root)
        else:
            self._ask_from(root)

    def keeps(self, holder: Any, index: int) -> bool:
        """Returns True to keep the part of `holder` at this index. A tree that is a leaf is part 0 of None."""
        # Holders are alive in the forms, so their ids are their own.
        return self._answers[id(holder), index].is_kept

    def _ask_from(self, root: _Occurrence) -> None:
        """Visits every object from the root on, and asks about its leaves.

        A filter that looks at paths is asked again at each path to an object. Another filter is asked again only if the
        variable or the module around the object, or the filter for it, differs.
        """
        visited: set[tuple[int, int, int, int]] = set()
        num_repeated = 0
        stack = [root]
        # Views are visited last, when all places outside views are known.
        views: list[_Occurrence] = []
        is_outside = True
        while stack or views:
            if not stack:
                stack, views, is_outside = views[::-1], [], False
            visit = stack.pop()
            if is_outside:
                self._own_places.setdefault(visit.obj, visit)
                if _is_view(visit.obj):
                    views.append(visit)
                    continue
            # The ids are of living objects: objects are alive in the forms, and filters in the parts of the prefix.
            key = id(visit.obj), id(visit.place.variable), id(visit.place.holder), id(visit.spec)
            if key in visited:
                if not visit.spec.asks_for_path:
                    continue
                num_repeated += 1
                if num_repeated > MOST_REPEATED_VISITS:
                    text = f"more than {MOST_REPEATED_VISITS:,} paths lead to objects that are on another path, too"
                    raise too_many_paths(OF_STATE.name, text)
            visited.add(key)
            for index, occurrence in enumerate(self._parts_of(visit)):
                if self._forms[occurrence.obj] is not None:
                    stack.append(occurrence)
                elif is_state_leaf(occurrence.obj):
                    if is_outside and carries_identity(occurrence.obj):
                        self._own_places.setdefault(occurrence.obj, occurrence)
                    self._ask_about((id(visit.obj), index), occurrence)

    def _parts_of(self, visit: _Occurrence) -> list[_Occurrence]:
        """Returns the parts of an object, each with its path and its filter."""
        obj, keys, place, spec, is_below_view = visit
        is_below_view = is_below_view or _is_view(obj)
        form = self._forms[obj]
        assert form is not None
        # Inside a variable of NNX, the variable stays the value that filters are asked about.
        if place.variable is None and is_module(obj):
            node_type = node_type_of(obj)
            is_variable = node_type is not None and node_type.convention == "variable"
            place = place._replace(holder=obj, variable=obj if is_variable else None)
        # One filter for each part of the object. If the filter is a tree prefix, `below` calls the lambda to divide it.
        if is_below_view and has_no_answer(spec):
            specs: Sequence[AnyFilter] = [spec] * len(form.parts)
        else:
            specs = self._parts.below(
                spec, type(obj), len(form.parts), keys, lambda part: _split(part, obj, form, keys)
            )
        visits: list[_Occurrence] = []
        for index, (part, part_spec) in enumerate(zip(form.parts, specs, strict=True)):
            # Empty if the path of the part is the path of the object.
            key = form.keys[index : index + 1]
            # The path for filters ends at the variable, as in NNX.
            step = () if place.variable is not None else tuple(map(step_of_path, key))
            part_place = place._replace(path=(*place.path, *step))
            occurrence = _Occurrence(part, (*keys, *key), part_place, part_spec, is_below_view)
            visits.append(self._at_own_place(occurrence) if is_below_view else occurrence)
        return visits

    def _at_own_place(self, occurrence: _Occurrence) -> _Occurrence:
        """Returns the occurrence to ask about in place of one below a view."""
        own_occurrence = self._own_places.get(occurrence.obj)
        if own_occurrence is None:
            return occurrence
        # Parts of a prefix that are one boolean or one function are one filter.
        if occurrence.spec is own_occurrence.spec or has_no_answer(occurrence.spec):
            return own_occurrence
        return occurrence._replace(place=own_occurrence.place)

    def _ask_about(self, slot: tuple[int, int], visit: _Occurrence) -> None:
        """Asks the filter about a leaf, and records the answer.

        Args:
            slot: id of the object that holds the leaf, and index of the leaf in it.
            visit: the leaf at its path.

        Raises:
            InconsistentSharingError: if the answer at an earlier path was different.
        """
        spec = self._parts.at_leaf(visit.spec, visit.keys)
        answer = _Answer(spec.selects(visit.place._replace(leaf=visit.obj)), visit.keys)
        first_answers = [self._answers.setdefault(slot, answer)]
        if carries_identity(visit.obj):
            first_answers.append(self._answers_of_arrays.setdefault(visit.obj, answer))
        for first_answer in first_answers:
            if first_answer.is_kept != answer.is_kept:
                # The kept one goes first.
                raise _conflict_error(*((answer, first_answer) if answer.is_kept else (first_answer, answer)))


def _is_view(obj: Any) -> bool:
    """Returns True for a view."""
    node_type = node_type_of(obj)
    return node_type is not None and node_type.is_view


def _split(part: Any, obj: Any, form: Form, keys: Path) -> Sequence[Any]:
    """Divides a part of a tree prefix into one for each part of an object.

    Args:
        part: the part of the prefix, which must be an instance of the same class.
        obj: the object.
        form: its form.
        keys: its path, for the error.

    Raises:
        SharingMismatchError: if the part of the prefix has another class, other names or another length.
    """
    prefix = form_of(part) if type(part) is type(obj) else None
    if prefix is None or prefix.names != form.names or len(prefix.parts) != len(form.parts):
        raise_prefix_mismatch(OF_STATE.name, part, f"a `{type(obj).__name__}` with {len(form.parts)} parts", keys)
    num_children = len(form.parts) - form.num_static
    # A prefix that was made of the model still has its static attributes. One that is no filter, such as a name,
    # selects nothing.
    statics = [static if is_one_filter(static) else False for static in prefix.parts[num_children:]]
    return (*prefix.parts[:num_children], *statics)


def _conflict_error(kept: _Answer, not_kept: _Answer) -> InconsistentSharingError:
    """Returns the error for a leaf that the filter selects at one path and not at another."""
    kept_path, other_path = jtu.keystr(kept.keys), jtu.keystr(not_kept.keys)
    return InconsistentSharingError(
        f"`{kept_path}` and `{other_path}` are one object, but `keep` selects it at the first path and not at the "
        "second.\n"
        "An object at several paths of the model is stored once in the state. Keep it at all of its paths, or untie "
        "it first:\n"
        f"    model = sharedtree.untie(model, lambda m: m{other_path})",
        (kept_path, other_path),
        ("kept", "not kept"),
    )
