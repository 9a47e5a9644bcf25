"""The parameters of a model with ties, as a tree in which each of them stands once: what optax is given.

A model is *cut* for optax: every node and every leaf stands at its first path only, and wherever it would come again,
like wherever there is a leaf that is not optimised, there is `NOTHING`, a node without children. So a cut tree is as
large as the model has nodes, however many paths there are, and optax's own functions work on it:

    Net(embed=Layer(w, b), head=w, again=<embed>)   cut:   Net(embed=Layer(w, b), head=NOTHING, again=NOTHING)

It is not `None`, for some transformations (`optax.contrib.galore`) take that for a leaf. What comes back is made
*whole*: wherever a cut tree turns up in it, the same record gets the same object, and `None` where nothing is
optimised. Masked parameters (`optax.MaskedNode()`) are nothing, too, of which the first path decides.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeGuard

from jax import tree_util as jtu

from ..core._by_identity import IdentityDict
from ..core._errors import (
    DepthError,
    InconsistentSharingError,
    SharingMismatchError,
    UnsaidVariableWarning,
    definition_of_caller,
    warn_about,
)
from ..core._node_types import node_type_of
from ..core._prefix_trees import labels
from ..core._printing import listed, shown
from ..core._recursion_limit import make_room
from ..core._static_values import Static
from ..core._structure import LEAF, FlatDag, Node, Path, depth_of, roles_in
from ..ties._list_ties import how_to_sum, is_inexact
from ..ties._policy_and_context import walk_exactly
from ..tree._asking_filters import selection
from ..tree._filters import AnyFilter
from ._wrt import select_everywhere

MAX_WHOLE = 100_000
"""How many paths a tree may have that is handed to a function which walks it as a tree."""


class Nothing:
    """Stands in a cut tree for what is not there. There is one instance, `NOTHING`."""

    def __repr__(self) -> str:
        return "NOTHING"


NOTHING = Nothing()
jtu.register_pytree_node(Nothing, lambda _: ((), None), lambda *_: NOTHING)


class Parameters(NamedTuple):
    """The parameters of one model, as a pattern that other trees can be matched with.

    Attributes:
        model: its records, without its objects.
        is_parameter: for each record, whether it is a traced leaf that is optimised.
        unsaid: the classes of variables that say neither that they are parameters nor that they are state, each with
            the path of the first that is optimised.
        state: the paths of what could be optimised, but is state.
    """

    model: FlatDag
    is_parameter: Sequence[bool]
    unsaid: Mapping[type, str] = MappingProxyType({})
    state: Sequence[str] = ()

    @classmethod
    def of(cls, model: Any, wrt: AnyFilter | None = None) -> "Parameters":
        """The inexact leaves of a model that are no state, or those that a filter selects.

        Raises:
            InconsistentSharingError: if it selects one at one of its paths and not at another.
            DepthError: if optax could not flatten the model.
        """
        walked = walk_exactly(model)
        if not make_room(depth := depth_of(walked.records)):  # optax flattens the model as a tree
            raise DepthError(
                f"The model is nested {depth - 1} deep. Optax has JAX flatten it as a tree, which would overflow the "
                "stack. Hold its layers in a tuple, or give Optax itself its leaves in one flat node, and those of the "
                "gradient:\n"
                "    state = optax.adam(1e-3).init(sharedtree.Dag(model))",
                ("",),
            )
        chosen = [op is LEAF and is_inexact(walked.objects[i]) for i, (op, _) in enumerate(walked.records)]
        unsaid: dict[type, str] = {}
        state: list[str] = []
        if wrt is None:
            roles = roles_in(walked)
            for number in sorted(roles.of_leaves):
                if chosen[number] and roles.is_state(number):
                    chosen[number] = False
                    state.append(jtu.keystr(walked.first_paths[number]))
            for number in roles.unsaid:
                if any(chosen[leaf] for leaf in walked.below(number).reached):
                    unsaid.setdefault(type(walked.objects[number]), jtu.keystr(walked.first_paths[number]))
        else:
            asked: dict[int, tuple[bool, Path]] = {}
            answers = selection(model, wrt, "params")
            for number, answer, path in labels(answers, walked, lambda part: isinstance(part, bool), "wrt"):
                before, first = asked.setdefault(number, (answer, path))
                if chosen[number] and answer != before:
                    selected, other = (first, path) if before else (path, first)
                    fix = select_everywhere([model], wrt, [walked.objects[number]])
                    raise _selected_once(jtu.keystr(selected), jtu.keystr(other), fix)
            chosen = [is_chosen and asked[number][0] for number, is_chosen in enumerate(chosen)]
        return cls(FlatDag(walked.records, walked.root), chosen, unsaid, state)

    @property
    def num_paths(self) -> int:
        paths: list[int] = []
        for _, children in self.model.records:
            paths.append(1 + sum(paths[child] for child in children))
        return paths[self.model.root]

    def matches(self, tree: Any) -> bool:
        """Whether a tree has the nodes of the model, down to its parameters."""
        root = self.model.node(self.model.root)
        if root is None or _is_nothing(tree):
            return False
        # Some states hold several arrays for a parameter. But a tuple with nodes in it is the state of a chain.
        may_be_node = not issubclass(root.type.cls, tuple)
        return all(
            place is not None and (may_be_node or not self.is_parameter[place[0]] or _is_small(place[1]))
            for place in self._places(tree)
        )

    def cut(self, tree: Any, name: str, advice: str | None = None) -> Any:
        """A matching tree with each parameter at its first path only.

        Args:
            tree: with the nodes of the model.
            name: what messages call it.
            advice: what to do if it lacks ties of the model; None for how gradients are summed.

        Raises:
            SharingMismatchError: if what is one parameter in the model is two objects in the tree.
        """
        first: dict[int, tuple[Any, Path]] = {}
        for place in self._places(tree):
            assert place is not None
            number, obj, path = place
            if self.is_parameter[number] and not _is_nothing(obj):
                before, where = first.setdefault(number, (obj, path))
                if not _are_one(before, obj):
                    if advice is None:
                        advice = how_to_sum(name, "model", in_containers=number in self.model.outside)
                    raise _two_objects(jtu.keystr(where), jtu.keystr(path), name, advice)
        return self._rebuilt(tree, lambda number, obj: obj if self.is_parameter[number] else NOTHING, again=False)

    def whole(self, tree: Any) -> Any:
        """The inverse of `cut`: new nodes, shared as in the model."""
        return self._rebuilt(tree, lambda _, obj: None if obj is NOTHING else obj, again=True)

    def missing_in(self, tree: Any) -> list[str]:
        """The paths of the parameters for which a matching tree has nothing."""
        places = [place for place in self._places(tree) if place is not None]
        return [jtu.keystr(path) for number, obj, path in places if self.is_parameter[number] and _is_nothing(obj)]

    def cut_labels(self, tree: Any, name: str) -> Any:
        """A mask, or another prefix of the model with a label for each parameter, in the shape of a cut tree.

        Raises:
            InconsistentSharingError: if a parameter has different labels at two of its paths.
            SharingMismatchError: if the prefix does not fit the model.
        """
        if self.is_label(tree):
            return tree
        _forbid_state_of_nnx(tree, self.model, name)
        found: dict[int, tuple[Any, Path]] = {}
        for number, label, path in labels(tree, self.model, self.is_label, name):
            before, first = found.setdefault(number, (label, path))
            if self.is_parameter[number] and not _are_equal(before, label):
                raise _two_labels(jtu.keystr(first), jtu.keystr(path), before, label, name)
        empty: list[Any] = []
        for op, children in self.model.records:
            below = [empty[child] for child in children]
            empty.append(op.type.put_together(op.aux.thaw(), below) if type(op) is Node else None)
        label_of = {number: label for number, (label, _) in found.items() if self.is_parameter[number]}
        return self._rebuilt(empty[self.model.root], lambda number, _: label_of.get(number, NOTHING), again=False)

    def is_label(self, obj: Any) -> bool:
        """Whether an object in a prefix of the model is a label, and not a node.

        Optax has JAX flatten masks and labels, so a node of a class that the model does not have, such as a dictionary
        or a `State` of Flax NNX, is no label either, but a tree of another shape.
        """
        return _is_nothing(obj) or node_type_of(obj) is None

    def _places(self, tree: Any) -> Iterator[tuple[int, Any, Path] | None]:
        """What a tree has where the model has its leaves, each pair of a record and an object once; None: no match."""
        stack: list[tuple[int, Any, Path]] = [(self.model.root, tree, ())]
        met: IdentityDict[set[int]] = IdentityDict()  # object of the tree → the records at which it was met
        while stack:
            number, obj, path = stack.pop()
            op, children = self.model.records[number]
            at = met.setdefault(obj, set())
            if number in at:
                continue
            at.add(number)
            if type(op) is not Node:
                yield number, obj, path
                continue
            node_type = node_type_of(obj)
            if node_type is None or node_type.cls is not op.type.cls:
                if _is_nothing(obj):
                    continue
                yield None
                return
            parts, aux = node_type.take_apart(obj)
            if len(parts) != len(children) or (op.type.is_plain and Static(aux) != op.aux):
                yield None
                return
            steps = tuple(zip(op.keys, children, parts, strict=True))
            stack.extend((child, part, (*path, key)) for key, child, part in reversed(steps))

    def _rebuilt(self, tree: Any, leaf: Callable[[int, Any], Any], *, again: bool) -> Any:
        """A matching tree, new from the root. What comes again is the same object if `again`, else nothing."""
        made: dict[int, Any] = {}
        finished: list[Any] = []
        stack: list[tuple[int, Any, bool]] = [(self.model.root, tree, False)]
        while stack:
            number, obj, is_complete = stack.pop()
            op = self.model.records[number][0]
            if number in made:
                finished.append(made[number] if again else NOTHING)
                continue
            if type(op) is not Node:
                node = leaf(number, obj)
            elif _is_nothing(obj):
                node = obj
            else:
                parts, aux = op.type.take_apart(obj)
                if not is_complete:
                    stack.append((number, obj, True))
                    steps = zip(self.model.records[number][1], parts, strict=True)
                    stack.extend((child, part, False) for child, part in reversed(tuple(steps)))
                    continue
                start = len(finished) - len(parts)
                node = op.type.put_together(aux, finished[start:])
                del finished[start:]
            finished.append(node)
            made[number] = node
        return finished[0]


class Models(NamedTuple):
    """What an optimizer optimises: one model, or the several of `optax.LookaheadParams`.

    Ties between those do not count: they begin with fast and slow weights that are one object, and must not stay so.
    """

    parts: Sequence[Parameters]

    @classmethod
    def of(cls, params: Any, wrt: AnyFilter | None = None) -> "Models":
        return cls([Parameters.of(part, wrt) for part in (params if holds_several_models(params) else [params])])

    @property
    def hold_parameters(self) -> bool:
        return any(any(part.is_parameter) for part in self.parts)

    def require_no_state(self) -> None:
        """Raises `ValueError` if there is nothing to optimise because all that could be is state."""
        state = [path for part in self.parts for path in part.state]
        if state:
            raise ValueError(
                f"Nothing is left to optimise: {listed(state)} {'is' if len(state) == 1 else 'are'} state, as the "
                "library says whose classes hold it.\n"
                "State is computed from data, and not trained. Give the optimizer the parameters, or say that it is to "
                "train state, too:\n"
                "    tx = sharedtree.optimizer(tx, wrt=...)"
            )

    def warn_of_unsaid(self) -> None:
        """Warns of variables that are optimised although nobody said what they are."""
        unsaid = {cls: path for part in self.parts for cls, path in part.unsaid.items()}
        if not unsaid:
            return
        which = listed([f"{cls.__name__}` at `{path}" for cls, path in unsaid.items()])
        filters = ", ".join(map(_exactly, unsaid))
        warn_about(
            definition_of_caller(),
            f"The optimizer trains each {which}, since a class of variables that is neither a `flax.nnx.Param` nor one "
            "of NNX's own for state may be either. Leave such variables alone, or say that they are parameters:\n"
            "    tx = sharedtree.optimizer(tx, wrt=nnx.Param)\n"
            f"    tx = sharedtree.optimizer(tx, wrt=(nnx.Param, {filters}))",
            UnsaidVariableWarning,
        )

    def cut(self, tree: Any, name: str, advice: str | None = None) -> Any:
        """A tree in which every part of the shape of a model is cut."""
        return self.change(tree, lambda part, found: part.cut(found, name, advice))

    def missing_in(self, tree: Any) -> list[str]:
        """The paths of the parameters for which a tree of the model's shape has nothing."""
        return [path for part in self.parts if part.matches(tree) for path in part.missing_in(tree)]

    def whole(self, tree: Any) -> Any:
        """The inverse of `cut`."""
        return self.change(tree, Parameters.whole)

    def change(self, tree: Any, change: Callable[[Parameters, Any], Any]) -> Any:
        """Changes every part of a tree that has the shape of a model."""
        made: IdentityDict[Any] = IdentityDict()

        def visit(obj: Any, parts: Sequence[Parameters]) -> Any:
            if obj in made:
                return made[obj]
            node_type = node_type_of(obj)
            if node_type is None:
                return obj
            found = next((part for part in parts if part.matches(obj)), None)
            if found is not None:
                new = change(found, obj)
            else:
                children, aux = node_type.take_apart(obj)
                each = [[part] for part in self.parts] if holds_several_models(obj) else [parts] * len(children)
                if len(each) != len(children):
                    each = [parts] * len(children)
                changed = [visit(child, own) for child, own in zip(children, each, strict=True)]
                is_same = all(new is old for new, old in zip(changed, children, strict=True))
                new = obj if is_same else node_type.put_together(aux, changed)
            if node_type.carries_identity:
                made[obj] = new
            return new

        return visit(tree, self.parts)

    def translated_labels(self, given: Any, name: str) -> Any:
        """Masks or labels that a transformation was given, as a function of the cut tree that it is asked about."""
        part = self.parts[0]
        is_function = callable(given) and node_type_of(given) is None
        if not is_function and part.is_label(given):
            return given

        def of(tree: Any) -> Any:
            if not is_function:
                return part.cut_labels(given, name)
            if part.num_paths > MAX_WHOLE or not part.matches(tree):
                return given(tree)
            return part.cut_labels(given(part.whole(tree)), name)

        return of


def _forbid_state_of_nnx(tree: Any, model: FlatDag, name: str) -> None:
    """Raises if a mask or labels have the shape of `nnx.state(model)`, and the optimizer is given the model itself."""
    root = model.node(model.root)
    is_state = type(tree).__module__ == "flax.nnx.statelib"
    if is_state and root is not None and root.type.cls is not type(tree):
        raise SharingMismatchError(
            f"The transformation's `{name}` is a `{type(tree).__name__}` of Flax NNX, but the optimizer is given a "
            f"`{root.type.cls.__name__}`.\n"
            "Each parameter is looked up at its path in the model. Put the values into a tree of the model's shape:\n"
            "    whole = sharedtree.tree.map(lambda _: False, model)\n"
            f"    nnx.update(whole, {name})\n"
            f"    {name} = whole"
        )


def _exactly(cls: type) -> str:
    """A filter for the variables of a class, as code. `nnx.Variable` itself is the base of those for state, too."""
    if cls.__module__.startswith("flax."):
        return f"lambda path, value: type(value) is nnx.{cls.__name__}"
    return cls.__name__


def holds_several_models(params: Any) -> TypeGuard[tuple[Any, ...]]:
    """Whether these are the parameters of two models, as those of `optax.lookahead` are."""
    optax = sys.modules.get("optax")  # without which there are none
    return optax is not None and isinstance(params, optax.LookaheadParams)


def _is_nothing(obj: Any) -> bool:
    """Whether an object stands for a parameter, or for a node of parameters, that is not there."""
    if obj is None or obj is NOTHING:
        return True
    optax = sys.modules.get("optax")
    return optax is not None and type(obj) is optax.MaskedNode


def _is_small(obj: Any) -> bool:
    return _is_nothing(obj) or node_type_of(obj) is None


def _are_one(one: Any, two: Any) -> bool:
    """Whether what two trees hold for a parameter is one object, or a value made of the same objects."""
    if one is two:
        return True
    (leaves, treedef), (others, other) = jtu.tree_flatten(one), jtu.tree_flatten(two)
    return (
        treedef == other
        and not jtu.treedef_is_leaf(treedef)
        and all(a is b for a, b in zip(leaves, others, strict=True))
    )


def _are_equal(one: Any, two: Any) -> bool:
    if one is two:
        return True
    try:
        return bool(one == two)
    except (TypeError, ValueError):  # arrays, which are no labels
        return False


def _two_objects(one: str, two: str, name: str, advice: str) -> SharingMismatchError:
    return SharingMismatchError(
        f"`{one}` and `{two}` are one parameter of the model, but two objects in the {name}.\n"
        f"A tied parameter has one gradient, the sum over its paths, and one slot. {advice}",
        (one, two),
    )


def _two_labels(first: str, second: str, one: Any, two: Any, name: str) -> InconsistentSharingError:
    return InconsistentSharingError(
        f"`{first}` and `{second}` are one parameter of the model, but the transformation's `{name}` has {shown(one)} "
        f"at the first path and {shown(two)} at the second.\n"
        "A tied parameter is updated once, in one way. Give it one value at all of its paths, or part them first:\n"
        f"    model = sharedtree.untie(model, lambda m: m{second})",
        (first, second),
        (shown(one), shown(two)),
    )


def _selected_once(selected: str, other: str, fix: str) -> InconsistentSharingError:
    return InconsistentSharingError(
        f"`{selected}` and `{other}` are one parameter of the model, but `wrt` selects it at the first path and not at "
        f"the second.\nA tied parameter is updated once, for all of its paths. "
        f"{fix or 'Select it at all of them. '}Or part them first:\n"
        f"    model = sharedtree.untie(model, lambda m: m{other})",
        (selected, other),
        ("selected", "not selected"),
    )
