"""Which leaves a state keeps, where a filter says so that is no function of a leaf alone.

A state has more than a tree: static attributes, and what `register_state` was told. So a filter is asked along the
forms of the objects, and not along the records of a walk.

    Linear(weight=w, name="out")   under  lambda path, value: path[-1] == "name"    {"weight": (), "name": "out"}
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax import tree_util as jtu

from ...core._by_identity import IdentityDict
from ...core._errors import InconsistentSharingError
from ...core._node_types import carries_identity, is_module, node_type_of
from ...core._prefix_trees import raise_unfit
from ...core._structure import Path
from .._asking_filters import MOST_REPEATED_VISITS, ROOT, PartsOfPrefix, step_of_path, too_many_paths
from .._filters import AnyFilter, Option, Place, is_one_filter
from ._state_forms import Form, form_of, is_state_leaf

OF_STATE = Option("keep", "sharedtree.state(model, keep=", "leaf")


class _Occurrence(NamedTuple):
    """An object on its path, what a filter is told of there, and the filter."""

    obj: Any
    keys: Path
    place: Place
    spec: AnyFilter


class _Answer(NamedTuple):
    """Whether a leaf is kept, and the path on which that was asked first."""

    is_kept: bool
    keys: Path


class KeptLeaves:
    """The leaves that a filter keeps, by the object that holds each, and the place in there.

    Args:
        tree: what the state is of.
        forms: the form of each object in it, None of a leaf; they keep alive what is here by address.
        spec: the filter.

    Raises:
        InconsistentSharingError: if a leaf that is one object is kept at one of its paths and not at another.
        SharingMismatchError: if a tree prefix does not fit.
        ValueError: if the filter looks at paths, and there are too many.
    """

    def __init__(self, tree: Any, forms: IdentityDict[Form | None], spec: AnyFilter) -> None:
        self._forms = forms
        self._parts = PartsOfPrefix()
        self._answers: dict[tuple[int, int], _Answer] = {}
        self._of_objects: IdentityDict[_Answer] = IdentityDict()
        root = _Occurrence(tree, (), ROOT, spec)
        if forms[tree] is None:
            self._note((id(None), 0), root)
        else:
            self._ask_from(root)

    def keeps(self, holder: Any, index: int) -> bool:
        """Tells whether the leaf that is this part of an object is kept; a tree that is a leaf is part 0 of None."""
        return self._answers[id(holder), index].is_kept  # alive in `forms`

    def _ask_from(self, root: _Occurrence) -> None:
        """Visits every object, on every path where the filter looks at paths."""
        visited: set[tuple[int, int, int, int]] = set()
        num_repeated = 0
        stack = [root]
        while stack:
            visit = stack.pop()
            # Objects are alive in the forms, and filters in the parts of the prefix.
            key = id(visit.obj), id(visit.place.variable), id(visit.place.holder), id(visit.spec)
            if key in visited:
                if not visit.spec.asks_for_path:
                    continue
                num_repeated += 1
                if num_repeated > MOST_REPEATED_VISITS:
                    text = f"more than {MOST_REPEATED_VISITS:,} paths lead to objects that are on another path, too"
                    raise too_many_paths(OF_STATE.name, text)
            visited.add(key)
            for index, occurrence in enumerate(self._below(visit)):
                if self._forms[occurrence.obj] is not None:
                    stack.append(occurrence)
                elif is_state_leaf(occurrence.obj):
                    self._note((id(visit.obj), index), occurrence)

    def _below(self, visit: _Occurrence) -> list[_Occurrence]:
        """Returns the parts of an object, each on its path."""
        obj, keys, place, spec = visit
        form = self._forms[obj]
        assert form is not None
        if place.variable is None and is_module(obj):
            node_type = node_type_of(obj)
            is_variable = node_type is not None and node_type.convention == "variable"
            place = place._replace(holder=obj, variable=obj if is_variable else None)
        specs = self._parts.below(spec, type(obj), len(form.parts), keys, lambda part: _split(part, obj, form, keys))
        visits: list[_Occurrence] = []
        for index, (part, part_spec) in enumerate(zip(form.parts, specs, strict=True)):
            key = form.keys[index : index + 1]  # none if the state of the part is that of the object
            step = () if place.variable is not None else tuple(map(step_of_path, key))
            visits.append(_Occurrence(part, (*keys, *key), place._replace(path=(*place.path, *step)), part_spec))
        return visits

    def _note(self, place: tuple[int, int], visit: _Occurrence) -> None:
        """Asks about a leaf, and raises if it is one place in the state with another answer."""
        spec = self._parts.at_leaf(visit.spec, visit.keys)
        answer = _Answer(spec.selects(visit.place._replace(leaf=visit.obj)), visit.keys)
        first_answers = [self._answers.setdefault(place, answer)]
        if carries_identity(visit.obj):
            first_answers.append(self._of_objects.setdefault(visit.obj, answer))
        for first in first_answers:
            if first.is_kept != answer.is_kept:
                raise _kept_somewhere(*((answer, first) if answer.is_kept else (first, answer)))


def _split(part: Any, obj: Any, form: Form, keys: Path) -> Sequence[Any]:
    """Returns what part of a prefix has for each part of an object."""
    prefix = form_of(part) if type(part) is type(obj) else None
    if prefix is None or prefix.names != form.names or len(prefix.parts) != len(form.parts):
        raise_unfit(OF_STATE.name, part, f"a `{type(obj).__name__}` with {len(form.parts)} parts", keys)
    num_children = len(form.parts) - form.num_static
    # A prefix that was made of the model has the model's static attributes, which are no filters.
    statics = [static if is_one_filter(static) else False for static in prefix.parts[num_children:]]
    return (*prefix.parts[:num_children], *statics)


def _kept_somewhere(kept: _Answer, not_kept: _Answer) -> InconsistentSharingError:
    kept_path, other_path = jtu.keystr(kept.keys), jtu.keystr(not_kept.keys)
    return InconsistentSharingError(
        f"`{kept_path}` and `{other_path}` are one place in the state, but `keep` selects it at the first path and not "
        "at the second.\n"
        "What is one object in the model is one in the state. Keep it at all of its paths, or part it first:\n"
        f"    model = sharedtree.untie(model, lambda m: m{other_path})",
        (kept_path, other_path),
        ("kept", "not kept"),
    )
