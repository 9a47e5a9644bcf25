"""Trees for optax, in which each parameter of a model with ties stands once, and a check for ties that got lost.

A *parameter* is a traced leaf that is optimised. A model is *cut* for optax: every node and every leaf stays at its
first path only. At all further paths, and in the place of each leaf that is not optimised, stands `NOTHING`, a node
without children. So the size of a cut tree is the number of nodes of the model, however many paths there are, and
optax's own functions work on it:

    Net(embed=Layer(w, b), head=w, again=<embed>)   cut:   Net(embed=Layer(w, b), head=NOTHING, again=NOTHING)

`NOTHING` is not `None`, because some transformations (`optax.contrib.galore`) take `None` for a leaf. The updates and
states from optax are made *whole*: in each cut tree in them, the same record gets the same object at all of its paths,
and a leaf that is not optimised becomes `None`. A masked parameter (`optax.MaskedNode()`) counts as absent, too. The
first path of a parameter decides whether it is masked.

The trees that optax and the user pass (gradients, states, masks) are compared with a *pattern*: the records of the
model, numbered, with a mark for each parameter. A tree *matches* if it has the same nodes as the model, down to the
parameters; in the place of a node, it may also have a placeholder for nothing.

The end of the file checks for ties that a model has lost since `init`. A tie can get lost in an eager loop, or because
an outer `jax.jit` or `equinox.filter_jit` encloses a step that keeps ties: such a transform sees trees. From the
outside the step looks right, but every update trains two weights where there was one. `init` gets the model, so the
optimizer can remember its ties and compare later models with them.
"""

import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeGuard

from jax import tree_util as jtu
from jax.core import Tracer

from ..core._by_identity import IdentityDict
from ..core._errors import (
    DepthError,
    InconsistentSharingError,
    SharingMismatchError,
    UnsaidVariableWarning,
    definition_of_caller,
    report_untied,
    warn_about,
)
from ..core._locks import Lock
from ..core._node_types import node_type_of
from ..core._prefix_trees import labels
from ..core._printing import listed, shown
from ..core._recursion_limit import make_room
from ..core._sharing import Rooted
from ..core._static_values import Static
from ..core._structure import LEAF, FlatDag, Node, Path, Record, Structure, depth_of, intern, roles_in
from ..ties._leaf_notes import note
from ..ties._list_ties import how_to_sum, is_inexact
from ..ties._policy_and_context import Policy, current_policy, walk_alone, walk_exactly
from ..ties._ties_that_are_missing import Lost, LostLeaf, at, lost_leaf_ties, maximal, named, unsettled
from ..ties._what_loses_ties import Advice
from ..tree._asking_filters import selection
from ..tree._filters import AnyFilter
from ._wrt import select_everywhere

MAX_WHOLE = 100_000
"""Most paths of a tree that may be passed whole to a function. The function walks it as a tree, once for each path."""


class Nothing:
    """Placeholder in a cut tree for an absent node or leaf. There is one instance, `NOTHING`."""

    def __repr__(self) -> str:
        return "NOTHING"


NOTHING = Nothing()
jtu.register_pytree_node(Nothing, lambda _: ((), None), lambda *_: NOTHING)


class PlacedObject(NamedTuple):
    """An object in a tree, at the place of a leaf of the model.

    Attributes:
        record: number of the leaf's record in the model.
        obj: the object of the tree. It can be a node: some states hold several arrays for one parameter.
        path: the first path at which the object was found there.
    """

    record: int
    obj: Any
    path: Path


class Parameters(NamedTuple):
    """Pattern of one model and its parameters, to be matched with gradients, states and masks.

    Attributes:
        model: records of the model, without its objects.
        is_parameter: for each record, True for an optimised traced leaf.
        unsaid: class of variables that is declared neither as parameters nor as state → path of its first variable
            that is optimised.
        state: paths of the floating-point leaves left out of the optimisation as state.
    """

    model: FlatDag
    is_parameter: Sequence[bool]
    unsaid: Mapping[type, str] = MappingProxyType({})
    state: Sequence[str] = ()

    @classmethod
    def of(cls, model: Any, wrt: AnyFilter | None = None) -> "Parameters":
        """Returns the pattern of a model.

        Args:
            model: the model.
            wrt: filter for the inexact leaves to optimise. None for all of them that are not state.

        Raises:
            InconsistentSharingError: if the filter selects a leaf at one of its paths and not at another.
            DepthError: if optax could not flatten the model.
        """
        dag = walk_exactly(model)
        # Optax has JAX flatten the model as a tree, which recurses in C. `make_room` raises the recursion limit, and
        # returns False if the C stack is too small for this depth.
        if not make_room(depth := depth_of(dag.records)):
            raise DepthError(
                f"The model is nested {depth - 1} levels deep, so optax cannot flatten it without overflowing the "
                "stack. Hold its layers in a tuple, or give optax the model and the gradients as `Dag`s, which are "
                "flat:\n"
                "    state = optax.adam(1e-3).init(sharedtree.Dag(model))",
                ("",),
            )
        is_parameter = [op is LEAF and is_inexact(dag.objects[record]) for record, (op, _) in enumerate(dag.records)]
        unsaid: dict[type, str] = {}
        state: list[str] = []
        if wrt is None:
            # Without a filter, the library of a module says which leaves are state.
            roles = roles_in(dag)
            for record in sorted(roles.of_leaves):
                if is_parameter[record] and roles.is_state(record):
                    is_parameter[record] = False
                    state.append(jtu.keystr(dag.first_paths[record]))
            for record in roles.unsaid:
                if any(is_parameter[leaf] for leaf in dag.below(record).reached):
                    unsaid.setdefault(type(dag.objects[record]), jtu.keystr(dag.first_paths[record]))
        else:
            # The filter answers once for each path. All answers for one leaf have to agree with the first.
            first_answers: dict[int, tuple[bool, Path]] = {}
            # A prefix of the model with the answers, which `labels` looks up at every path of every leaf.
            answers = selection(model, wrt, "params")
            for record, answer, path, _ in labels(answers, dag, lambda part: isinstance(part, bool), "wrt"):
                first_answer, first_path = first_answers.setdefault(record, (answer, path))
                if is_parameter[record] and answer != first_answer:
                    selected_path, omitted_path = (first_path, path) if first_answer else (path, first_path)
                    fix = select_everywhere([model], wrt, [dag.objects[record]])
                    raise _selected_once(jtu.keystr(selected_path), jtu.keystr(omitted_path), fix)
            is_parameter = [is_leaf and first_answers[record][0] for record, is_leaf in enumerate(is_parameter)]
        return cls(FlatDag(dag.records, dag.root), is_parameter, unsaid, state)

    @property
    def num_paths(self) -> int:
        """Number of nodes and leaves of the model as a tree: each object counts once for each path."""
        # Children have smaller records than their parents, so one pass is enough.
        num_paths_below: list[int] = []
        for _, children in self.model.records:
            num_paths_below.append(1 + sum(num_paths_below[child] for child in children))
        return num_paths_below[self.model.root]

    def matches(self, tree: Any) -> bool:
        """Returns True if a tree has the same nodes as the model, down to the leaves."""
        root = self.model.node(self.model.root)
        # A bare array has no shape to look for: every leaf would match.
        if root is None or _is_nothing(tree):
            return False
        # In the place of a parameter, some states hold a node with several arrays. But if the model is a tuple, a tuple
        # with nodes in it is the state of a chain: `optax.chain(a, b)` has the state `(state_a, state_b)`.
        may_hold_nodes = not issubclass(root.type.cls, tuple)
        for place in self._places(tree):
            # `_places` yields None if the tree does not match.
            if place is None:
                return False
            if not may_hold_nodes and self.is_parameter[place.record] and not _is_small(place.obj):
                return False
        return True

    def cut(self, tree: Any, name: str, advice: str | None = None) -> Any:
        """Cuts a tree: returns it with each parameter at its first path only, and `NOTHING` in all other places.

        Args:
            tree: a tree that matches.
            name: name of the tree in messages.
            advice: fix for a tree without the ties of the model, as text. None for advice to sum gradients over paths.

        Raises:
            SharingMismatchError: if the tree has two objects for one parameter of the model.
        """
        first_places: dict[int, PlacedObject] = {}
        for place in self._places(tree):
            assert place is not None
            if self.is_parameter[place.record] and not _is_nothing(place.obj):
                first_place = first_places.setdefault(place.record, place)
                if not _are_one(first_place.obj, place.obj):
                    if advice is None:
                        advice = how_to_sum(name, "model", in_containers=place.record in self.model.outside)
                    raise _two_objects(jtu.keystr(first_place.path), jtu.keystr(place.path), name, advice)
        return self._rebuilt(tree, lambda record, obj: obj if self.is_parameter[record] else NOTHING, keeps_ties=False)

    def whole(self, tree: Any) -> Any:
        """Makes a cut tree whole: returns new nodes with the ties of the model, and None for each `NOTHING`."""
        return self._rebuilt(tree, lambda _, obj: None if obj is NOTHING else obj, keeps_ties=True)

    def missing_in(self, tree: Any) -> list[str]:
        """Returns the paths of the parameters for which a matching tree has a placeholder."""
        places = [place for place in self._places(tree) if place is not None]
        absent = [place for place in places if self.is_parameter[place.record] and _is_nothing(place.obj)]
        return [jtu.keystr(place.path) for place in absent]

    def cut_labels(self, tree: Any, name: str, *, is_of_function: bool = False) -> Any:
        """Returns a mask, or another prefix of the model with a label for each parameter, as a cut tree.

        A parameter may also be below a view, a node for an array that is computed from it. A label None there follows
        the label at the parameter's own place.

        Args:
            tree: the mask or prefix. A single label is returned unchanged.
            name: name of the transformation's parameter, for errors.
            is_of_function: True if a function of the user returned the prefix. Such functions often go by path, and a
                rule by path holds for the parameter's own place, so all labels below views follow it.

        Raises:
            InconsistentSharingError: if a parameter has different labels at two of its paths.
            SharingMismatchError: if the prefix does not fit the model.
        """
        if self.is_label(tree):
            return tree
        _forbid_state_of_nnx(tree, self.model, name)
        # Record → the label at its first path, and that path.
        first_labels: dict[int, tuple[Any, Path]] = {}
        for record, label, path, view_path in labels(tree, self.model, self.is_label, name):
            if view_path is not None and (is_of_function or _is_nothing(label)):
                continue
            first_label, first_path = first_labels.setdefault(record, (label, path))
            if self.is_parameter[record] and not _are_equal(first_label, label):
                advice = "" if view_path is None else _label_by_name(name)
                raise _two_labels(jtu.keystr(first_path), jtu.keystr(path), first_label, label, name, advice)
        # A prefix can lack nodes of the model, so the labels are put into a copy of the model without values.
        empty_nodes: list[Any] = []
        for op, children in self.model.records:
            parts = [empty_nodes[child] for child in children]
            empty_nodes.append(op.type.put_together(op.aux.thaw(), parts) if type(op) is Node else None)
        label_of = {record: label for record, (label, _) in first_labels.items() if self.is_parameter[record]}
        empty_model = empty_nodes[self.model.root]
        return self._rebuilt(empty_model, lambda record, _: label_of.get(record, NOTHING), keeps_ties=False)

    def is_label(self, obj: Any) -> bool:
        """Returns True if an object in a prefix of the model is a label or a placeholder, False if it is a node.

        Every node is a part of the prefix, even if the model has no node of its class: optax has JAX flatten masks and
        labels, so a dictionary or a `State` of Flax NNX cannot be one label.
        """
        return _is_nothing(obj) or node_type_of(obj) is None

    def _places(self, tree: Any) -> Iterator[PlacedObject | None]:
        """Yields the objects of a tree at the leaves of the model. If the tree does not match, yields None and stops.

        An object that a tree has at several paths of one leaf is yielded once, at the first of them.
        """
        stack: list[tuple[int, Any, Path]] = [(self.model.root, tree, ())]
        # Object of the tree → the records at which the walk has visited it.
        visits: IdentityDict[set[int]] = IdentityDict()
        while stack:
            record, obj, path = stack.pop()
            op, children = self.model.records[record]
            visited_records = visits.setdefault(obj, set())
            if record in visited_records:
                continue
            visited_records.add(record)
            if type(op) is not Node:
                yield PlacedObject(record, obj, path)
                continue
            node_type = node_type_of(obj)
            if node_type is None or node_type.cls is not op.type.cls:
                # A placeholder for a whole node still matches. A masked state has some.
                if _is_nothing(obj):
                    continue
                yield None
                return
            parts, aux = node_type.take_apart(obj)
            # The auxiliary data of a plain container are its keys. Those of a module are static values, such as a step
            # count, and a state may have been made with others.
            if len(parts) != len(children) or (op.type.is_plain and Static(aux) != op.aux):
                yield None
                return
            steps = tuple(zip(op.keys, children, parts, strict=True))
            stack.extend((child, part, (*path, key)) for key, child, part in reversed(steps))

    def _rebuilt(self, tree: Any, new_leaf: Callable[[int, Any], Any], *, keeps_ties: bool) -> Any:
        """Rebuilds a tree of the model's shape from new nodes and new leaves.

        Args:
            tree: the tree; it is not changed.
            new_leaf: (number of a leaf's record, object of the tree there) → the object for the new tree. It is called
                for the first path of each leaf.
            keeps_ties: True to put the new object at all paths of its record, False to put `NOTHING` at all further
                paths.
        """
        # Number of a record → the new object at its first path.
        new_objects: dict[int, Any] = {}
        # New objects that wait for their parents, in the order of the parents' children.
        pending: list[Any] = []
        # A node comes twice: first to put its children on the stack, then, complete, to be built of them.
        stack: list[tuple[int, Any, bool]] = [(self.model.root, tree, False)]
        while stack:
            record, obj, is_complete = stack.pop()
            op = self.model.records[record][0]
            # A further path of the record.
            if record in new_objects:
                pending.append(new_objects[record] if keeps_ties else NOTHING)
                continue
            if type(op) is not Node:
                new = new_leaf(record, obj)
            elif _is_nothing(obj):
                new = obj
            else:
                parts, aux = op.type.take_apart(obj)
                if not is_complete:
                    stack.append((record, obj, True))
                    steps = zip(self.model.records[record][1], parts, strict=True)
                    stack.extend((child, part, False) for child, part in reversed(tuple(steps)))
                    continue
                start = len(pending) - len(parts)
                new = op.type.put_together(aux, pending[start:])
                del pending[start:]
            pending.append(new)
            new_objects[record] = new
        return pending[0]


class Models(NamedTuple):
    """The patterns of an optimizer's models: of one model, or of the two in `optax.LookaheadParams`.

    Ties between the two models do not count. Their weights, fast and slow ones, begin as the same objects, and become
    different objects with the first step.

    Attributes:
        parts: one pattern for each model.
    """

    parts: Sequence[Parameters]

    @classmethod
    def of(cls, params: Any, wrt: AnyFilter | None = None) -> "Models":
        """Returns the patterns of the models in `params`. For `wrt` and errors see `Parameters.of`."""
        return cls([Parameters.of(part, wrt) for part in (params if holds_several_models(params) else [params])])

    @property
    def hold_parameters(self) -> bool:
        """True if one of the models has a leaf to optimise."""
        return any(any(part.is_parameter) for part in self.parts)

    @property
    def paths_of_views(self) -> list[str]:
        """Paths of the views in the models. A view is a node for an array that is computed from others."""
        paths: list[str] = []
        for part in self.parts:
            for number, (op, _) in enumerate(part.model.records):
                if type(op) is Node and op.type.is_view:
                    paths.append(part.model.text(number))
        return paths

    def require_no_state(self) -> None:
        """Raises `ValueError` if a floating-point leaf is state. To be called if the models hold no parameters.

        The error says that nothing is left to optimise, since all floating-point leaves are state.
        """
        state = [path for part in self.parts for path in part.state]
        if state:
            raise ValueError(
                f"The optimizer has nothing to train: {listed(state)} {'is' if len(state) == 1 else 'are'} declared as "
                "state.\n"
                "State is computed from data, not trained. Give the optimizer a model with parameters. Or let it train "
                "state, too: three dots, Python's `Ellipsis`, select everything:\n"
                "    tx = sharedtree.optimizer(tx, wrt=...)"
            )

    def warn_of_unsaid(self) -> None:
        """Warns of optimised variables that are declared neither as parameters nor as state."""
        unsaid = {cls: path for part in self.parts for cls, path in part.unsaid.items()}
        if not unsaid:
            return
        variables = listed([f"{cls.__name__}` at `{path}" for cls, path in unsaid.items()])
        filters = ", ".join(map(_exactly, unsaid))
        warn_about(
            definition_of_caller(),
            f"The optimizer trains {variables}, but the class is neither a `flax.nnx.Param` nor one of NNX's classes "
            "for state. To train only `nnx.Param`s:\n"
            "    tx = sharedtree.optimizer(tx, wrt=nnx.Param)\n"
            "If these variables are parameters, too, say so:\n"
            f"    tx = sharedtree.optimizer(tx, wrt=(nnx.Param, {filters}))",
            UnsaidVariableWarning,
        )

    def cut(self, tree: Any, name: str, advice: str | None = None) -> Any:
        """Cuts every part of a tree matching a model. For the arguments and errors see `Parameters.cut`."""
        return self.change(tree, lambda pattern, part: pattern.cut(part, name, advice))

    def missing_in(self, tree: Any) -> list[str]:
        """Returns the paths of the parameters absent from a tree. Empty if the tree does not match a model."""
        return [path for part in self.parts if part.matches(tree) for path in part.missing_in(tree)]

    def whole(self, tree: Any) -> Any:
        """Makes every part of a tree whole that matches a model. For the result see `Parameters.whole`."""
        return self.change(tree, Parameters.whole)

    def change(self, tree: Any, change: Callable[[Parameters, Any], Any]) -> Any:
        """Replaces every part of a tree matching a model.

        Args:
            tree: an optimizer state, updates, or any other tree.
            change: (pattern of a model, part of the tree that matches it) → the new part.

        Returns:
            A tree with the new parts. Nodes without such parts are the same objects as in `tree`.
        """
        # Nodes that are one object in the tree stay one.
        new_objects: IdentityDict[Any] = IdentityDict()

        def visit(obj: Any, patterns: Sequence[Parameters]) -> Any:
            """Returns the new object in the place of a node or leaf. Its parts are compared with these patterns."""
            if obj in new_objects:
                return new_objects[obj]
            node_type = node_type_of(obj)
            if node_type is None:
                return obj
            # The pattern that the object matches, None if it matches none.
            pattern = next((pattern for pattern in patterns if pattern.matches(obj)), None)
            if pattern is not None:
                new = change(pattern, obj)
            else:
                children, aux = node_type.take_apart(obj)
                # In `optax.LookaheadParams`, each of the two models is compared with its own pattern only: the two have
                # one shape, so both would match the first pattern.
                patterns_of_children = (
                    [[pattern] for pattern in self.parts] if holds_several_models(obj) else [patterns] * len(children)
                )
                if len(patterns_of_children) != len(children):
                    patterns_of_children = [patterns] * len(children)
                new_children = [visit(*pair) for pair in zip(children, patterns_of_children, strict=True)]
                is_same = all(new is old for new, old in zip(new_children, children, strict=True))
                new = obj if is_same else node_type.put_together(aux, new_children)
            if node_type.carries_identity:
                new_objects[obj] = new
            return new

        return visit(tree, self.parts)

    def translated_labels(self, mask: Any, name: str) -> Any:
        """Translates the user's mask or labels for the model into those for cut trees.

        Args:
            mask: one label, a prefix of the model, or a function that takes a tree of the model's shape and returns a
                prefix.
            name: name of the transformation's parameter, for errors.

        Returns:
            `mask` itself if it is one label. Else a function that takes a cut tree and returns its labels as a cut
            tree.
        """
        pattern = self.parts[0]
        is_function = callable(mask) and node_type_of(mask) is None
        if not is_function and pattern.is_label(mask):
            return mask

        def labels_of(tree: Any) -> Any:
            """Returns the labels of a cut tree."""
            if not is_function:
                return pattern.cut_labels(mask, name)
            # The function sees the whole model, unless the model has too many paths to be walked as a tree.
            if pattern.num_paths > MAX_WHOLE or not pattern.matches(tree):
                return mask(tree)
            return pattern.cut_labels(mask(pattern.whole(tree)), name, is_of_function=True)

        return labels_of


def _forbid_state_of_nnx(tree: Any, model: FlatDag, name: str) -> None:
    """Raises if a mask has the shape of `nnx.state(model)` while the optimizer works on the model itself."""
    root = model.node(model.root)
    is_state = type(tree).__module__ == "flax.nnx.statelib"
    if is_state and root is not None and root.type.cls is not type(tree):
        raise SharingMismatchError(
            f"The transformation's `{name}` is a `{type(tree).__name__}` of Flax NNX, but the optimizer is given a "
            f"`{root.type.cls.__name__}`.\n"
            "Its values are looked up at the paths of the parameters in the model. Put them into a tree of the "
            "model's shape:\n"
            "    whole = sharedtree.tree.map(lambda _: False, model)\n"
            f"    nnx.update(whole, {name})\n"
            f"    {name} = whole"
        )


def _exactly(cls: type) -> str:
    """Returns code of a filter for the variables of a class, for a message."""
    # The filter `nnx.Variable` would also select instances of its subclasses, and so state.
    if cls.__module__.startswith("flax."):
        return f"lambda path, value: type(value) is nnx.{cls.__name__}"
    return cls.__name__


def holds_several_models(params: Any) -> TypeGuard[tuple[Any, ...]]:
    """Returns True for `optax.LookaheadParams`, the namedtuple of two models for `optax.lookahead`."""
    # Looked up, not imported: before optax is imported, nobody can have made a `LookaheadParams`.
    optax = sys.modules.get("optax")
    return optax is not None and isinstance(params, optax.LookaheadParams)


def _is_nothing(obj: Any) -> bool:
    """Returns True for a placeholder of an absent parameter or node: `None`, `NOTHING`, `optax.MaskedNode()`."""
    if obj is None or obj is NOTHING:
        return True
    optax = sys.modules.get("optax")
    return optax is not None and type(obj) is optax.MaskedNode


def _is_small(obj: Any) -> bool:
    """Returns True for a leaf or a placeholder, False for a node."""
    return _is_nothing(obj) or node_type_of(obj) is None


def _are_one(first: Any, second: Any) -> bool:
    """Returns True for one object, and for two nodes of one structure that hold the same objects as leaves."""
    if first is second:
        return True
    # In the place of a parameter some states have a node, which `jax.tree.map` makes anew at each path.
    leaves, treedef = jtu.tree_flatten(first)
    second_leaves, second_treedef = jtu.tree_flatten(second)
    return (
        treedef == second_treedef and not jtu.treedef_is_leaf(treedef) and all(map(operator.is_, leaves, second_leaves))
    )


def _are_equal(first: Any, second: Any) -> bool:
    """Returns True if two labels are equal. False if they cannot be compared."""
    if first is second:
        return True
    try:
        return bool(first == second)
    # The comparison of two arrays is an array, which has no truth value. No transformation has arrays as labels.
    except (TypeError, ValueError):
        return False


def _two_objects(first_path: str, second_path: str, name: str, advice: str) -> SharingMismatchError:
    """Returns the error for a tree with two objects for one parameter of the model."""
    return SharingMismatchError(
        f"`{first_path}` and `{second_path}` are one parameter of the model, but two objects in the {name}.\n"
        "A tied parameter has one gradient, the sum over its paths, and one array of each kind in the optimizer's "
        f"state. {advice}",
        (first_path, second_path),
    )


def _label_by_name(name: str) -> str:
    """Returns the fix for a mask that has a label of its own for a view: a rule asked once for each parameter.

    Args:
        name: name of the transformation's parameter.
    """
    return (
        "A view has the label of the array that it is computed from. A rule by name is asked at the array's own path "
        "by\n"
        f"    {name} = sharedtree.tree.map_with_path(rule, model)\n"
    )


def _two_labels(
    first_path: str, second_path: str, first_label: Any, second_label: Any, name: str, advice: str
) -> InconsistentSharingError:
    """Returns the error for a mask with two labels for one parameter of the model.

    Args:
        first_path: path of the first label.
        second_path: path of the second label.
        first_label: the first label.
        second_label: the second label.
        name: name of the transformation's parameter.
        advice: whole lines before the usual fix. May be empty.
    """
    return InconsistentSharingError(
        f"`{first_path}` and `{second_path}` are one parameter of the model, but the transformation's `{name}` has "
        f"{shown(first_label)} at the first path and {shown(second_label)} at the second.\n"
        f"A tied parameter is updated once, in one way. {advice}Give it one value at all of its paths, or untie it "
        "first:\n"
        f"    model = sharedtree.untie(model, lambda m: m{second_path})",
        (first_path, second_path),
        (shown(first_label), shown(second_label)),
    )


def _selected_once(selected_path: str, omitted_path: str, fix: str) -> InconsistentSharingError:
    """Returns the error for a filter selecting a tied parameter at only one of two paths."""
    return InconsistentSharingError(
        f"`{selected_path}` and `{omitted_path}` are one parameter of the model, but `wrt` selects it at the first "
        "path and not at the second.\n"
        f"A tied parameter is updated once, for all of its paths. {fix or 'Select it at all of them. '}Or untie it "
        "first:\n"
        f"    model = sharedtree.untie(model, lambda m: m{omitted_path})",
        (selected_path, omitted_path),
        ("selected", "not selected"),
    )


# --- ties that get lost after `init` ----------------------------------------------------------------------------------

# A *sharing* is the structure of a model without its static values: the nodes, and which of them are one object.
# One optimizer remembers at most this number of sharings. A program has one, or a few in turn.
_MOST_SHARINGS = 16


class Wording(NamedTuple):
    """Words for an optimizer's messages: the name of the model, and fixes. A fix is a sentence and lines of code.

    Attributes:
        model: name of the model.
        around_modules: fix to keep the ties of modules in a traced step.
        around_containers: fix to keep the ties of lists and dicts in a traced step.
        eagerly: fix to keep ties in an eager loop.
        meant: fix for a user who wants the ties to go: code that undoes them on purpose.
        untied_state: fix for a state without the ties of the model: sentence and code in one text.
        new_state: code that makes a new state.
    """

    model: str
    around_modules: tuple[str, str]
    around_containers: tuple[str, str]
    eagerly: tuple[str, str]
    meant: tuple[str, str]
    untied_state: str
    new_state: str


OF_OPTIMIZERS = Wording(
    "model",
    # around_modules
    (
        "`jax.jit` and `equinox.filter_jit` around the whole step untie a model. `sharedtree.jit` does not:",
        "    step = sharedtree.jit(step)",
    ),
    # around_containers
    (
        "Transforms treat arrays in lists and dicts as separate values, also `sharedtree.jit`. This policy keeps their "
        "ties. Give it to each transform:",
        "    step = sharedtree.jit(step, policy=sharedtree.Policy(containers=True))",
    ),
    # eagerly
    ("In an eager loop, this keeps ties:", "    model = sharedtree.apply_updates(model, updates)"),
    # meant
    (
        "If the model is meant to have no ties, untie it and begin with a new state:",
        "    model = sharedtree.untie(model)\n    state = optimizer.init(model)",
    ),
    # untied_state
    "Change a state with `sharedtree.tree.map`, which keeps its ties. Or begin with a new state, without the moments "
    "so far:\n    state = optimizer.init(model)",
    # new_state
    "    state = optimizer.init(model)",
)
"""Words for `sharedtree.optimizer`, whose user has a model, a state and an optimizer."""


class InitialTies:
    """Memory of the sharings of the models given to `init` of one optimizer.

    It has at most `_MOST_SHARINGS` entries, and keeps no array alive.

    Args:
        wording: texts for the reports.
    """

    def __init__(self, wording: Wording = OF_OPTIMIZERS) -> None:
        self._wording = wording
        # Sharings of models at `init`.
        self._initial_sharings: tuple[Structure, ...] = ()
        # Sharings of later models whose lost ties need no report any more.
        self._reported_sharings: tuple[Structure, ...] = ()
        # Guards both tuples, which are replaced and not changed, so that readers need no lock.
        self._lock = Lock()

    def remember(self, model: Any) -> None:
        """Adds the sharing of a model given to `init`.

        Cost: a walk over its nodes.
        """
        sharing = _without_values(walk_alone(model))
        with self._lock:
            self._initial_sharings = _with(self._initial_sharings, sharing)

    def check(self, model: Any, state: Any) -> list[LostLeaf]:
        """Reports the ties that a model lacks and that the model at `init`, or else the optimizer's state, has.

        Each sharing of a model is reported once. Ties undone by `untie` are not reported.

        Args:
            model: the parameters, or a gradient.
            state: state of the optimizer.

        Returns:
            All these ties, including those that are not reported now. Empty under `Policy(on_untie="ignore")`, and if
            the sharing was reported before and the model has no tracers.

        Raises:
            UntiedError: under `Policy(on_untie="error")`.

        Cost: a walk over the nodes of both.
        """
        policy = current_policy()
        if policy.on_untie == "ignore":
            return []
        dag = walk_alone(model)
        sharing = _without_values(dag)
        is_reported = sharing in self._reported_sharings
        # An eager loop calls this at each step, so a sharing that was reported must cost one walk only. In a trace, the
        # caller needs the lost ties: it notes the slots of the new state.
        if is_reported and not any(isinstance(leaf, Tracer) for leaf in dag.leaves.values()):
            return []

        # Find the lost ties.
        missing, when = self._missing(sharing), "when the optimizer was initialised"
        if not missing:
            missing, when = _tied_in_state(sharing, walk_alone(state)), "in the optimizer's state"
        if not missing or is_reported:
            return missing

        # Report them, except for those that are meant or were reported elsewhere.
        lost = unsettled(missing, dag.objects)
        if lost:
            self._report(maximal(lost), dag, when, policy)
            # A transform that sees one of these leaves later does not report its loss again.
            note(dag.objects[part] for tie in lost for part in tie.parts)
        # Later models with this sharing are not reported either, whether this one was or not.
        with self._lock:
            self._reported_sharings = _with(self._reported_sharings, sharing)
        return missing

    def _report(self, losses: Sequence[Lost], dag: FlatDag, when: str, policy: Policy) -> None:
        """Warns of lost ties, or raises, depending on the policy.

        Args:
            losses: the lost ties, at least one.
            dag: the model without them.
            when: end of the sentence "were one object …".
            policy: the policy in force.

        Raises:
            UntiedError: under `Policy(on_untie="error")`.
        """
        # For each lost tie, its paths in words.
        names = [named(self._wording.model, lost.paths) for lost in losses]
        text = "; ".join(map(listed, names[:3])) + (f"; and {len(names) - 3} more" if len(names) > 3 else "")
        number_of_objects = "two objects" if len(names) == 1 and len(names[0]) == 2 else "several objects"
        fact = (
            f"{text} are {number_of_objects} in the parameters of an update, but were one {when}. They are updated "
            "separately."
        )

        # The fixes depend on where the tied leaves stand, and on whether the update is traced.
        ties = [tie for lost in losses for tie in lost.ties]
        in_containers = all(part in dag.outside for tie in ties for part in tie.parts)
        is_traced = any(isinstance(dag.objects[part], Tracer) for tie in ties for part in tie.parts)
        wording = self._wording
        around = wording.around_containers if in_containers else wording.around_modules
        advice = Advice(None, [around, wording.meant if is_traced else wording.eagerly])
        paths = [path for tie_paths in names for path in tie_paths]
        report_untied(
            policy.on_untie, definition_of_caller(), fact, advice.text, paths, count=len(losses), may_wait=True
        )

    def _missing(self, sharing: Structure) -> list[LostLeaf]:
        """Finds the lost ties of a model, compared with the most similar of the models at `init`.

        Returns:
            The lost ties. Empty if a model at `init` had this very sharing, or if no model at `init` had the same nodes
            and all ties of this model.
        """
        missing: list[LostLeaf] = []
        if sharing in self._initial_sharings:
            return []
        for initial_sharing in self._initial_sharings:
            lost = _lost(initial_sharing, sharing)
            # Skip models of another shape, and models that lack a tie of this one.
            if lost is None or _lost(sharing, initial_sharing):
                continue
            if not lost:
                return []
            missing = min(missing or lost, lost, key=len)
        return missing


def note_in_state(model: Any, state: Any, missing: Sequence[LostLeaf]) -> None:
    """Notes in a new state the slots of parameters with lost ties, so that the same loss is not reported twice.

    A slot is the optimizer's value for one parameter, for example its momentum. If the model lost a tie, its slots lost
    it, too. The loss is reported for the model. A note on a slot keeps later calls from reporting it again.

    Args:
        model: the parameters, or a gradient.
        state: the new state, from the update of these parameters.
        missing: the ties lost by the model.
    """
    sharing, state_dag = _without_values(walk_alone(model)), walk_alone(state)
    shape_numbers: dict[Any, int] = {}
    model_shape = _shapes(sharing.records, shape_numbers)[sharing.root]
    paths = dict.fromkeys(path for tie in missing for path in tie.paths)
    # Every subtree of the state with the model's shape has a slot at each of these paths.
    for record, shape in enumerate(_shapes(state_dag.records, shape_numbers)):
        if shape == model_shape and state_dag.holds_leaf[record]:
            note(state_dag.objects[at(state_dag, record, path)] for path in paths)


def _with(sharings: tuple[Structure, ...], sharing: Structure) -> tuple[Structure, ...]:
    """Returns the sharings with one more at the end. It stands there once, and the oldest ones are dropped."""
    return (*[old for old in sharings if old is not sharing], sharing)[-_MOST_SHARINGS:]


def _without_values(tree: FlatDag) -> Structure:
    """Returns the sharing of a tree: its structure with an empty static value in place of each static value."""
    records: list[Record] = []
    for op, children in tree.records:
        if type(op) is Node:
            records.append((Node(op.type, _NO_VALUE, op.keys), children))
        else:
            records.append((LEAF if op is LEAF else _NO_VALUE, children))
    return intern(tuple(records), tree.root)


_NO_VALUE = Static(None)


def _lost(initial: Rooted, current: Rooted) -> list[LostLeaf] | None:
    """Finds the ties of leaves that `initial` has and `current` lacks. None if the trees differ in their nodes."""

    # Where one tree has a parameter, a gradient or a masked state may have None, which is a node without children.
    def both_are_childless(i: int, j: int) -> bool:
        return not initial.records[i][1] and not current.records[j][1]

    return lost_leaf_ties(initial, current, both_are_childless)


def _tied_in_state(model: Structure, state: FlatDag) -> list[LostLeaf]:
    """Finds ties of leaves that the model lacks, and that all trees of the model's shape in a state have.

    For example, the state of Adam has two such trees, `mu` and `nu`.
    """
    # A bare array has no shape to look for.
    if not model.records[model.root][1]:
        return []
    shape_numbers: dict[Any, int] = {}
    model_shape = _shapes(model.records, shape_numbers)[model.root]
    # Paths of a tie → the tie, for the ties of all trees so far. None before the first tree.
    common_ties: dict[tuple[Path, Path], LostLeaf] | None = None
    for record, shape in enumerate(_shapes(state.records, shape_numbers)):
        if shape == model_shape and state.holds_leaf[record]:
            ties = {tie.paths: tie for tie in _lost(state.below(record), model) or ()}
            if common_ties is None:
                common_ties = ties
            else:
                common_ties = {paths: tie for paths, tie in common_ties.items() if paths in ties}
    return list((common_ties or {}).values())


def _shapes(records: Sequence[Record], shape_numbers: dict[Any, int]) -> list[int]:
    """Returns a number for each record. Two records have one number if they are trees of the same nodes.

    Leaves do not count, whatever they are.

    Args:
        records: the records.
        shape_numbers: (class of a node, numbers of its children) → number. New entries are added. Numbers from two
            calls can be compared if both calls got the same dict.
    """
    shapes: list[int] = []
    for op, children in records:
        key = (op.type.cls, *(shapes[child] for child in children)) if type(op) is Node and children else ()
        shapes.append(shape_numbers.setdefault(key, len(shape_numbers)))
    return shapes
