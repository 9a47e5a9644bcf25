"""Transforms that take a function and are unknown otherwise: nobody knows how they treat arguments and results.

Such a transform gets the arguments as they are, bare arrays and plain containers, but with a leaf group in the place of
each outermost module. All modules of a call are one graph, walked once: the children of its root. The group of a child
has the leaves that no earlier child has. So a shared leaf comes with the first module that holds it:

    T(f)([Net(w), Net(w)], x)     T gets     f' and ([ChildGroup(0, [w]), ChildGroup(1, [])], x)

The modules in the function's result are a second graph, divided in the same way. The transform may return groups of
either graph, in any nesting: those of results, and those in the shape of arguments, such as gradients. The class of the
graph's root tells the two apart.
"""

import bisect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax import tree_util as jtu

from ..core._by_identity import IdentityDict
from ..core._call_arguments import Arguments
from ..core._errors import SharingMismatchError
from ..core._node_types import Inherited, is_module, node_type_of
from ..core._pack_and_unpack import unpack, walked
from ..core._prefix_trees import Branch
from ..core._sharing import distinct
from ..core._static_values import Static
from ..core._structure import FlatDag, Given, Node, Structure, Update, intern, leaf_paths, with_paths
from ..ties._leaf_notes import are_tied_values_known, hand_on
from ..ties._policy_and_context import Policy
from ._caller_side import Call, Grouping, enter, keep, leave
from ._function_side import FunctionTrace, Received, packed, receive
from ._function_transform import FunctionTransform
from ._in_place import Changes, conventions, rules_for_state, walked_together
from ._leaf_groups import LeafGroup, LeafSelection, whole
from ._leaf_labels import Treatment
from ._pass_through import is_object_outside
from .checks._tied_values import report_tied_values


class OpaqueTransform(FunctionTransform):
    """A transform that is only known to treat all arguments alike."""

    def check_options(self) -> None:
        """Refuses options that reach inside a module, since nobody knows how to translate them."""
        for name, option in self.options.items():
            if any(map(is_module, jtu.tree_leaves(option, is_leaf=is_module))):
                raise TypeError(
                    f"`{name}` of `{self.transform_name}` reaches inside a module, and no adapter says how to "
                    "translate it to the leaves that the transform sees. Give one value for the whole module, or say "
                    "which known transform has the same options:\n"
                    "    sharedtree.register_transform(transform, jax.vmap)"
                )
        super().check_options()

    def treatments(self, owners: Sequence[str]) -> Sequence[Treatment]:
        """Says what the transform does to each outermost module.

        Args:
            owners: for each module the argument that it is in.
        """
        return ()

    # The caller's side --------------------------------------------------------------------------------------------

    def called(self, args: Sequence[Any], kwargs: dict[str, Any], policy: Policy) -> Any:
        """Calls the transform with groups in the place of modules, and returns modules in the place of groups."""
        # Bare arrays are not packed, so a tie between them is lost inside the function.
        if are_tied_values_known():
            arguments = walked(self.arguments(args, kwargs), self.rules(policy))
            report_tied_values(arguments, self.names, self.transform_name, policy)
        call, outermost = self._enter(args, kwargs, policy)
        # One transformed function for each policy, so that the transform can cache traces.
        transformed = self._made.get(policy)
        if transformed is None:
            transformed = self._made.setdefault(policy, self.transform(self.inner(policy), **self.options))
        grouped = self._arguments(args, kwargs, outermost.replaced_by(call.groups))
        with call:
            try:
                result = transformed(*grouped.args, **grouped.kwargs)
            except Exception as error:
                self.explain(error, lambda: call)
                raise
        if not policy.in_place:
            return _put_together(result, call)
        changes = Changes(call, self.transform_name)
        # Both are put together at once, since a changed object may be part of the result.
        _, result = _put_together(_with_changes_first(result, self.transform_name), call, changes)
        changes.commit()
        return result

    def enter(self, args: Sequence[Any], kwargs: dict[str, Any], policy: Policy) -> Call:
        """Takes the outermost modules apart."""
        return self._enter(args, kwargs, policy)[0]

    def _enter(self, args: Sequence[Any], kwargs: dict[str, Any], policy: Policy) -> "tuple[Call, _Outermost]":
        """Packs the outermost modules as one graph. Returns the call, and the modules with the trees around them."""
        values = (*args, *[kwargs[name] for name in sorted(kwargs)])
        outermost = _Outermost.modules(values, policy)
        # An unregistered transform treats modules by the arguments that hold them, so plans depend on these.
        owners = self._owners(outermost, args, kwargs)
        key = type(self), *owners
        grouping = Grouping(self.transform_name, lambda _: self.treatments(owners), key, _unless_references)
        call = enter(_by_path(owners, outermost, outermost.objects), self.rules(policy), grouping)
        call.arguments = self._arguments(args, kwargs, values)
        call.groups = _split(LeafGroup(list(call.tree.leaves.values()), LeafSelection(call.tree.structure, None, call)))
        return call, outermost

    def _owners(self, outermost: "_Outermost", args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
        """Names the argument that holds each module."""
        names = (*self.names.of(len(args)), *sorted(kwargs))
        return [names[path[0].idx] for path in outermost.paths]

    def _arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any], values: Sequence[Any]) -> Arguments:
        """Returns the arguments of a call with other values.

        Args:
            args: positional arguments. Only their number counts.
            kwargs: keyword arguments. Only their names count.
            values: the new values: those by position, then those by keyword, sorted by name.
        """
        by_keyword = dict(zip(sorted(kwargs), values[len(args) :], strict=True))
        # A function with `**kwargs` sees the order of its keyword arguments, so the order stays.
        return Arguments(self.names.of(len(args)), values[: len(args)], {name: by_keyword[name] for name in kwargs})

    # The function's side ------------------------------------------------------------------------------------------

    def call_inside(self, policy: Policy, function: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> Any:
        """Calls the user's function with modules in the place of groups, and returns groups in the place of modules."""
        trace = FunctionTrace(self.terms(policy), function)
        received = self._receive(args, kwargs, policy)
        result = trace.call_with(received, received.arguments.args, received.arguments.kwargs)
        trace.check_walked(trace.walked(trace.with_state(result)), is_with_state=bool(policy.in_place))
        outermost = _Outermost.modules(result, policy)
        if not policy.in_place:
            return outermost.replaced_by(_split(packed(trace.walked(tuple(outermost.objects)))))
        return _split_with_changes(outermost, trace, received)

    def _receive(self, args: Sequence[Any], kwargs: Mapping[str, Any], policy: Policy) -> Received:
        """Puts modules in the place of groups.

        Raises:
            SharingMismatchError: if an array is in a group that the transform left out, or what the function changes in
                place could not be written back.
        """
        outermost = _Outermost((*args, *[kwargs[name] for name in sorted(kwargs)]), _is_group)
        runs = _runs(outermost.objects)
        # The usual case: the transform passes on all arguments of the call, each once.
        if len(runs) == 1 and runs[0].is_whole and _is_of_arguments(runs[0].structure):
            received = receive([LeafGroup(runs[0].leaves, runs[0].selection)])
            modules = [received.arguments.args[group.position] for group in outermost.objects]
        elif runs and policy.in_place:
            raise SharingMismatchError(_NOT_WRITTEN_BACK.format(self.transform_name))
        else:
            modules = _built(outermost.objects, runs, self._root_of_a_part)
            by_path = _by_path(self._owners(outermost, args, kwargs), outermost, modules)
            received = Received(walked(by_path, self.rules(policy)), by_path, None)
        return received._replace(arguments=self._arguments(args, kwargs, outermost.replaced_by(modules)))

    def _root_of_a_part(self, run: "_Run") -> Any:
        """Builds modules of which a transform may have left some out, or which the function has returned."""
        if run.missing_places and not _is_of_arguments(run.structure):
            raise SharingMismatchError(_PART_OF_RESULTS)
        if run.missing_places:
            path = leaf_paths(run.selection.structure)[run.missing_places[0]]
            raise SharingMismatchError(
                f"`{self.transform_name}` passes only a part of the arguments to the function, and what it passes "
                f"shares `{path}` with what it leaves out.\n"
                "An array that several modules share comes with the first of them. Pass what belongs together as one "
                "value:\n"
                "    f(sharedtree.Dag((model, shared)))"
            )
        return unpack(run.structure, run.leaves)


def _split_with_changes(outermost: "_Outermost", trace: FunctionTrace, received: Received) -> "_WithChanges":
    """Splits what a function changed in place, and what it returned, into groups.

    Returns:
        A group for each object that was changed; and the result, with groups in the place of its modules.
    """
    rules = rules_for_state(trace.forbidding(trace.terms.rules), received.tree, lambda _: False)
    # The library of the nearest enclosing module says which leaves of an object are traced.
    convention_of = conventions(received.tree, rules)
    # The changed objects are the first children of the graph, and the modules of the result follow.
    updated = list((rules.updated or IdentityDict[int]()).values())
    objects = [*[received.tree.objects[number] for number in updated], *outermost.objects]
    convention_of_each: list[Inherited] = [convention_of[number] for number in updated]
    convention_of_each.extend(rules.convention for _ in outermost.objects)
    graph = walked_together(zip(objects, convention_of_each, strict=True), rules, [""] * len(objects))
    groups = _split(packed(graph))
    return _WithChanges(groups[: len(updated)], outermost.replaced_by(groups[len(updated) :]))


class _WithChanges(NamedTuple):
    """Objects that a function changed in place, and its result.

    A transform may return this anywhere in a tree, beside values of its own. It is found there by its class.
    """

    changed: Any
    result: Any


def _with_changes_first(result: Any, transform_name: str) -> tuple[Any, Any]:
    """Takes the changes out of the tree that a transform returned.

    Returns:
        The changes, and the tree with the function's own result in the place of `_WithChanges`.

    Raises:
        SharingMismatchError: if the tree holds `_WithChanges` several times or not at all.
    """
    leaves, treedef = jtu.tree_flatten(result, is_leaf=lambda obj: isinstance(obj, (_WithChanges, ChildGroup)))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, _WithChanges)]
    if len(places) != 1:
        raise SharingMismatchError(_NOT_RETURNED_ONCE.format(transform_name))
    changed, leaves[places[0]] = leaves[places[0]]
    return changed, treedef.unflatten(leaves)


_NOT_RETURNED_ONCE = (
    "`{0}` does not return once what the function has returned, so what the function changes could not be written "
    "back, as `in_place=True` has it.\n"
    "Say that changes are meant to be lost, and return what is to be kept:\n"
    "    f = sharedtree.preserve_identities(transform, in_place=False)(f)"
)


def _by_path(owners: Sequence[str], outermost: "_Outermost", objects: Sequence[Any]) -> Arguments:
    """Returns objects as the arguments of a call, each named by its path: the children of the graph's root."""
    texts = [owner + jtu.keystr(path[1:]) for owner, path in zip(owners, outermost.paths, strict=True)]
    return Arguments(tuple(texts), objects, {})


_PART_OF_RESULTS = (
    "The transform returned a part of what the function returned, and an object in it is shared with a part that was "
    "left out. Let the function return what belongs together as one value:\n"
    "    return sharedtree.Dag((model, shared))"
)

_NOT_WRITTEN_BACK = (
    "`{0}` passes to the function something else than all of its arguments, each once. What the function changes could "
    "not be written back, as `in_place=True` has it.\n"
    "Say that changes are meant to be lost, and return what is to be kept:\n"
    "    f = sharedtree.preserve_identities(transform, in_place=False)(f)"
)


class UnregisteredTransform(OpaqueTransform):
    """A transform that was never registered, and may treat each argument differently.

    So a module in two arguments is an error, and arrays are cut between arguments. Ties inside one argument stay. A
    vmap with `in_axes=(0, None)` hidden in a lambda would otherwise map one occurrence of a module and not the other,
    and silently compute something else.
    """

    writes = False

    def called(self, args: Sequence[Any], kwargs: dict[str, Any], policy: Policy) -> Any:
        """Calls the transform. Refuses `in_place=True`, since changes would have to be returned with the result."""
        if policy.in_place:
            raise ValueError(
                f"`in_place=True` adds to what a function returns, which `{self.transform_name}` may not "
                "stand: it is not registered. Say that it is a plain function transformer:\n"
                "    sharedtree.register_transform(transform)"
            )
        return super().called(args, kwargs, policy)

    def treatments(self, owners: Sequence[str]) -> Sequence[Treatment]:
        """Says that each argument might be treated in its own way, so that a module in two of them is an error."""
        return [
            Treatment(
                "arguments",
                Branch(tuple(owners)),
                lambda label: isinstance(label, str),
                describe=lambda owner: f"in `{owner}`, whose treatment is not known",
                is_known=False,
                advice=lambda _: (
                    "The transform is not registered, so it may treat these arguments differently without "
                    "a way to tell. If it treats all arguments alike, say so, once:\n"
                    "    sharedtree.register_transform(transform)\n"
                    "or, if it is some other transform with options of its own:\n"
                    "    sharedtree.register_transform(transform, jax.vmap)\n"
                ),
            )
        ]


def _unless_references(leaves: Sequence[Any]) -> tuple[()] | None:
    """Returns () if a plan can be kept for such leaves. None if one is a reference, an error where arrays are cut."""
    return None if any(isinstance(leaf, jax.Ref) for leaf in leaves) else ()


# --- modules taken apart -----------------------------------------------------------------------------------------


class ChildGroup(LeafGroup):
    """Leaves of one child of a graph's root, without those that an earlier child has.

    Args:
        leaves: the leaves, in the order of the graph.
        selection: selection of all leaves of the graph. Groups with one selection belong to one graph.
        position: position of the child.
    """

    __slots__ = ("position",)

    def __init__(self, leaves: Sequence[Any], selection: LeafSelection, position: int) -> None:
        super().__init__(leaves, selection)
        self.position = position

    @property
    def places(self) -> slice:
        """Places of its leaves among those of the graph."""
        return _places_of_children(self.structure)[self.position]

    @property
    def paths(self) -> list[str]:
        """Paths of its leaves below the child. JAX prints them after the path of the child itself."""
        root, _ = self.structure.records[self.structure.root]
        assert type(root) is Node
        return [path.removeprefix(str(root.keys[self.position])) for path in super().paths[self.places]]

    @property
    def is_tree(self) -> bool:
        """True if the child can be built from this group alone."""
        run = _Run({self.position: self})
        is_of_other_side = any(type(op) in (Given, Update) for op, _ in run.structure.records)
        return not run.missing_places and not is_of_other_side

    def tree(self) -> Any:
        """Builds the child."""
        run = _Run({self.position: self})
        return _children_of(unpack(run.structure, run.leaves))[self.position]


jtu.register_pytree_with_keys(
    ChildGroup,
    lambda group: (with_paths(group.leaves, group.paths), (group.selection, group.position)),
    lambda aux, leaves: ChildGroup(tuple(leaves), *aux),
    lambda group: (group.leaves, (group.selection, group.position)),
)


def _is_group(item: Any) -> bool:
    return isinstance(item, ChildGroup)


def _split(graph: LeafGroup) -> list[LeafGroup]:
    """Divides all leaves of a graph into one group for each child of its root."""
    slices = _places_of_children(graph.structure)
    return [ChildGroup(graph.leaves[places], graph.selection, position) for position, places in enumerate(slices)]


def _places_of_children(structure: Structure) -> Sequence[slice]:
    """Returns, for each child of the root, the places of the leaves that no earlier child has. Cached."""
    places: list[slice] | None = structure.plans.get("places of children")
    if places is None:
        places, start, numbers = [], 0, structure.leaf_numbers
        for child in structure.records[structure.root][1]:
            # A walk numbers all that is below one child before anything that is only below the next.
            stop = max(start, bisect.bisect_right(numbers, child))
            places.append(slice(start, stop))
            start = stop
        places = keep(structure, "places of children", places)
    return places


def _children_of(root: Any) -> Sequence[Any]:
    node_type = node_type_of(root)
    assert node_type is not None
    return node_type.take_apart(root)[0]


class _Outermost:
    """The outermost objects of one kind in a tree, and the tree around them.

    Args:
        tree: a tree that JAX can flatten around these objects.
        is_chosen: returns True for an object of this kind.

    Attributes:
        objects: the objects, in flatten order.
        paths: the path of each object.
    """

    def __init__(self, tree: Any, is_chosen: Callable[[Any], bool]) -> None:
        pairs, self._treedef = jtu.tree_flatten_with_path(tree, is_leaf=is_chosen)
        self._leaves = [leaf for _, leaf in pairs]
        self._places = [place for place, leaf in enumerate(self._leaves) if is_chosen(leaf)]
        self.objects = [self._leaves[place] for place in self._places]
        self.paths = [pairs[place][0] for place in self._places]

    @classmethod
    def modules(cls, tree: Any, policy: Policy) -> "_Outermost":
        """Finds the outermost modules, and other objects that carry identity outside modules."""
        return cls(tree, lambda obj: is_object_outside(obj, containers=policy.containers))

    def replaced_by(self, objects: Sequence[Any]) -> Any:
        """Builds the tree with other objects in their places."""
        leaves = list(self._leaves)
        for place, obj in zip(self._places, objects, strict=True):
            leaves[place] = obj
        return self._treedef.unflatten(leaves)


# --- modules put together ----------------------------------------------------------------------------------------


class _Run:
    """Groups that a transform returned together: groups of one graph, for each child at most one.

    Args:
        groups: position → group. At least one.

    Attributes:
        selection: the selection of the graph.
        is_whole: True if no child is missing.
        structure: structure of the graph, with None in the place of each missing child.
        places: places of its leaves among those of the whole graph.
        leaves: the leaf at each place. None if the leaf came with a missing child.
        missing_places: the places of such missing leaves.
    """

    def __init__(self, groups: Mapping[int, ChildGroup]) -> None:
        self.groups = groups
        self.selection = next(iter(groups.values())).selection
        structure = self.selection.structure
        self.is_whole = len(groups) == len(_places_of_children(structure))
        self.structure, self.places = _select(structure, tuple(sorted(groups)))
        # A place of a kept child may belong to a group that the transform left out.
        leaf_at: dict[int, Any] = {}
        for group in groups.values():
            leaf_at.update(zip(range(structure.num_leaves)[group.places], group.leaves, strict=True))
        self.leaves = [leaf_at.get(place) for place in self.places]
        self.missing_places = [place for place in self.places if place not in leaf_at]


def _select(structure: Structure, positions: tuple[int, ...]) -> tuple[Structure, Sequence[int]]:
    """Returns a structure with None for all children but some, and the places of its leaves. Cached.

    Args:
        structure: structure of the whole graph.
        positions: positions of the children that stay.
    """
    children = structure.records[structure.root][1]
    if len(positions) == len(children):
        return structure, range(structure.num_leaves)
    key = "some children", positions
    selection: tuple[Structure, Sequence[int]] | None = structure.plans.get(key)
    if selection is None:
        *rest, (root, _) = structure.records
        selected = FlatDag([*rest, (root, tuple([children[i] for i in positions]))], structure.root).reached
        records = [record if n in selected else (Static(None), ()) for n, record in enumerate(structure.records)]
        places = [place for place, number in enumerate(structure.leaf_numbers) if number in selected]
        selection = keep(structure, key, (intern(tuple(records), structure.root), places))
    return selection


def _runs(groups: Sequence[ChildGroup]) -> list[_Run]:
    """Divides groups into runs.

    A transform that calls the function twice may return parts of two graphs of one structure. A shared leaf must not be
    taken from the other graph. So groups of results belong together only if they have one selection. If JAX has cached
    the function's trace, both graphs have the same selection. Then the second graph begins where a child comes again.
    Groups of arguments belong to one call, but JAX may have kept an equal selection of an earlier call for some. So
    they belong together if they have one structure.
    """
    runs: list[dict[int, ChildGroup]] = []
    latest: IdentityDict[dict[int, ChildGroup]] = IdentityDict()
    for group in groups:
        graph = group.structure if _is_of_arguments(group.structure) else group.selection
        run = latest.get(graph)
        if run is None or run.get(group.position, group) is not group:
            run = latest[graph] = {}
            runs.append(run)
        run[group.position] = group
    return [_Run(run) for run in runs]


def _is_of_arguments(structure: Structure) -> bool:
    """Returns True for a graph of arguments. The root of a graph of results is a tuple."""
    op, _ = structure.records[structure.root]
    return type(op) is Node and op.type.cls is Arguments


def _built(groups: Sequence[ChildGroup], runs: Sequence[_Run], build: Callable[[_Run], Any]) -> list[Any]:
    """Builds the child that each group stands for.

    Args:
        groups: the groups. One group may stand at several places.
        runs: the same groups, divided into runs.
        build: run → the tree built from it.
    """
    child_of: IdentityDict[Any] = IdentityDict()
    for run in runs:
        children = _children_of(build(run))
        for position, group in run.groups.items():
            child_of[group] = children[position]
    return [child_of[group] for group in groups]


def _put_together(result: Any, call: Call, changes: Changes | None = None) -> Any:
    """Puts modules in the place of the groups that a transform returned, at every depth.

    Args:
        result: what the transform returned.
        call: the call that ends.
        changes: collects the changes of the caller's objects. None if nothing is written back.

    Raises:
        SharingMismatchError: if the transform returned only a part of the function's results, and this part shares an
            object with the rest.
    """
    outermost = _Outermost(result, _is_group)
    groups = outermost.objects
    runs = _runs(groups)
    _refuse_ambiguous(runs, call)
    return outermost.replaced_by(_built(groups, runs, lambda run: _root_of_run(run, call, changes)))


def _refuse_ambiguous(runs: Sequence[_Run], call: Call) -> None:
    """Raises if nobody can tell which value a shared leaf has in a result of the transform.

    A transform may return several trees in the shape of the arguments, for example gradients and parameters. If they
    come one after the other, each is complete. If they come in pairs, `[(g0, m0), (g1, m1)]`, the leaf that `g1` shares
    with `g0` looks like the leaf that `m1` shares with `m0`.

    Raises:
        SharingMismatchError: if a tree is not complete, and a part of it shares a leaf with another part; or if one
            part of it is the caller's and another is not, and they share a leaf.
    """
    for run in runs:
        if not _is_of_arguments(run.selection.structure):
            continue
        # A complete tree may still be mixed from two results.
        if run.is_whole:
            place = _find_mixed_place(run, call)
            if place is not None:
                raise _ambiguous(run, place)
            continue
        # With several incomplete trees, each group counts by itself, since it may belong to any of them.
        is_only_one = [r.selection.structure for r in runs].count(run.selection.structure) == 1
        parts = [run] if is_only_one else [_Run({position: group}) for position, group in run.groups.items()]
        missing = [place for part in parts for place in part.missing_places]
        if missing:
            raise _ambiguous(run, missing[0])


def _find_mixed_place(run: _Run, call: Call) -> int | None:
    """Finds a leaf shared by two modules of a complete graph, if only one of them came back with the caller's leaves.

    A transform may return the parameters of one module and the gradient of another. Together they look like one tree,
    and the leaf that came with the first would be put into the second, too.

    Returns:
        The place of the leaf in the graph. None if there is none.
    """
    if run.selection.structure is not call.tree.structure:
        return None
    originals = list(call.tree.leaves.values())
    # 1. Find out for each module with leaves of its own whether they are the caller's.
    places_of = {position: range(len(originals))[group.places] for position, group in run.groups.items()}
    is_callers: dict[int, bool] = {}
    for position, group in run.groups.items():
        if places_of[position]:
            pairs = zip(group.leaves, places_of[position], strict=True)
            is_callers[position] = all(leaf is originals[place] for leaf, place in pairs)
    if len(set(is_callers.values())) < 2:
        return None
    # 2. Find a leaf that comes with one module and belongs to another of the other kind.
    holder_of = {place: position for position, places in places_of.items() for place in places}
    for position, is_unchanged in is_callers.items():
        for place in _Run({position: run.groups[position]}).missing_places:
            if is_callers[holder_of[place]] != is_unchanged:
                return place
    return None


def _ambiguous(run: _Run, place: int) -> SharingMismatchError:
    """Makes the error for a shared leaf whose value nobody can tell."""
    path = leaf_paths(run.selection.structure)[place]
    return SharingMismatchError(
        f"The transform returns something like a part of its arguments, and this shares `{path}` with another "
        "part. Whether that is left out, or which of several results it belongs to, cannot be known.\n"
        "An array that several modules share comes with the first of them. Pass what belongs together as one "
        "value:\n"
        "    f(sharedtree.Dag((model, shared)))",
        (path,),
    )


def _root_of_run(run: _Run, call: Call, changes: Changes | None) -> Any:
    """Builds the graph of a run on the caller's side, with None for each missing child."""
    structure = run.selection.structure
    if run.missing_places:
        raise SharingMismatchError(_PART_OF_RESULTS)
    # In a Jacobian, a tree with groups of its own stands in the place of a leaf.
    leaves: Sequence[Any] = [
        leaf if node_type_of(leaf) is None else _put_together(leaf, call, changes) for leaf in run.leaves
    ]
    if structure is call.tree.structure:
        # A tree in the shape of the arguments, such as a gradient: what is known of their leaves holds for its own.
        leaves = distinct(leaves)
        originals = list(call.tree.leaves.values())
        hand_on([originals[place] for place in run.places], leaves)
    graph = whole(leaves, run.structure)
    return leave([graph], *(() if changes is None else (call.objects.__getitem__, changes.update)))
