"""Transforms that take a function and are unknown otherwise: nobody knows how they treat arguments and results.

Such a transform gets the arguments as they are, bare arrays and plain containers, but with a leaf group in the place of
each outermost module. All modules of a call are one graph, walked once: the children of its root. The group of a child
has the leaves that no earlier child has. So a shared leaf comes with the first module that holds it:

    T(f)([Net(w), Net(w)], x)     T gets     f' and ([ChildGroup(0, [w]), ChildGroup(1, [])], x)

The modules in the function's result are a second graph, divided in the same way. The transform may return groups of
either graph, in any nesting: those of results, and those in the shape of arguments, such as gradients. The class of the
graph's root tells the two apart: `Arguments` or a tuple.

Groups come back from the transform as leaves of a tree, perhaps not all, some several times, from several calls of the
function. A *run* is a set of groups that belong to one graph and can be built together, at most one for each child.
A *place* is the index of a leaf among all leaves of a graph.
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
from ._function_side import FunctionTrace, Received, receive, single_group_of_tree
from ._function_transform import FunctionTransform
from ._in_place import Changes, conventions, flatten_together, rules_for_state
from ._leaf_groups import LeafGroup, LeafSelection, single_group
from ._leaf_labels import Treatment
from ._pass_through import has_identity_outside
from .checks._tied_values import report_tied_values


class OpaqueTransform(FunctionTransform):
    """A function under a transform of which only one thing is known: it treats all arguments alike."""

    def check_options(self) -> None:
        """Refuses options that hold a module, such as a prefix tree with one label for each leaf.

        Nobody knows how to translate them to leaf groups. All other options are passed on.

        Raises:
            TypeError: if an option holds a module.
        """
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
        """Returns the treatments of the outermost modules, by which their leaves are grouped. Empty if all are alike.

        Args:
            owners: for each module the name of the argument that it is in.
        """
        return ()

    # The caller's side --------------------------------------------------------------------------------------------

    def call_in_python(self, args: Sequence[Any], kwargs: dict[str, Any], policy: Policy) -> Any:
        """Calls the transform with groups in the place of modules, and returns modules in the place of groups."""
        # Arrays outside modules are not packed, so a tie between them is lost inside the function. Warn of it.
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
        # The changes and the result are put together at once, since a changed object may be part of the result.
        _, result = _put_together(_with_changes_first(result, self.transform_name), call, changes)
        changes.commit()
        return result

    def enter(self, args: Sequence[Any], kwargs: dict[str, Any], policy: Policy) -> Call:
        """Packs the outermost modules. See the base."""
        return self._enter(args, kwargs, policy)[0]

    def _enter(self, args: Sequence[Any], kwargs: dict[str, Any], policy: Policy) -> "tuple[Call, _Outermost]":
        """Packs the outermost modules as one graph.

        Returns:
            The call, with a `ChildGroup` for each module; and the modules with the trees around them.
        """
        values = (*args, *[kwargs[name] for name in sorted(kwargs)])
        outermost = _Outermost.modules(values, policy)
        # Under an unregistered transform, a module's treatment depends on the argument that holds it. So plans do, too.
        owners = self._owners(outermost, args, kwargs)
        key = type(self), *owners
        grouping = Grouping(self.transform_name, lambda _: self.treatments(owners), key, _unless_references)
        call = enter(_by_path(owners, outermost, outermost.objects), self.rules(policy), grouping)
        # `enter` knows the modules alone. The call gets the arguments as the user wrote them, and one group for each
        # module in the place of the groups by label.
        call.arguments = self._arguments(args, kwargs, values)
        call.groups = _split(LeafGroup(list(call.tree.leaves.values()), LeafSelection(call.tree.structure, None, call)))
        return call, outermost

    def _owners(self, outermost: "_Outermost", args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
        """Returns, for each module, the name of the argument that holds it.

        Args:
            outermost: the modules. The tree around them is a tuple of all arguments.
            args: positional arguments. Only their number counts.
            kwargs: keyword arguments. Only their names count.
        """
        # A path begins with the position of the argument in that tuple.
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
        trace.check_flattened(trace.flatten(trace.with_state(result)), is_with_state=bool(policy.in_place))
        # The modules of the result are the children of the second graph.
        outermost = _Outermost.modules(result, policy)
        if not policy.in_place:
            return outermost.replaced_by(_split(single_group_of_tree(trace.flatten(tuple(outermost.objects)))))
        return _split_with_changes(outermost, trace, received)

    def _receive(self, args: Sequence[Any], kwargs: Mapping[str, Any], policy: Policy) -> Received:
        """Builds the arguments of the function from what the transform passes to it.

        The function gets modules in the place of groups. They are built from all groups at once if the transform passes
        on all groups of one call and no others. Otherwise each run is built by itself. Then nothing can be written
        back, so in place that is an error.

        Args:
            args: positional arguments from the transform, with groups in them.
            kwargs: keyword arguments from the transform.
            policy: what carries identity.

        Returns:
            What the function receives.

        Raises:
            SharingMismatchError: if an array is in a group that the transform left out, or what the function changes in
                place could not be written back.
        """
        outermost = _Outermost((*args, *[kwargs[name] for name in sorted(kwargs)]), _is_group)
        runs = _runs(outermost.objects)
        # The usual case: the transform passes on all groups of the call, and perhaps one of them several times.
        if len(runs) == 1 and runs[0].is_whole and _is_of_arguments(runs[0].structure):
            received = receive([LeafGroup(runs[0].leaves, runs[0].selection)])
            modules = [received.arguments.args[group.position] for group in outermost.objects]
        elif runs and policy.in_place:
            raise SharingMismatchError(_NOT_WRITTEN_BACK.format(self.transform_name))
        else:
            modules = _built(outermost.objects, runs, self._root_of_a_part)
            by_path = _by_path(self._owners(outermost, args, kwargs), outermost, modules)
            # None: it is not known to which call the modules belong.
            received = Received(walked(by_path, self.rules(policy)), by_path, None)
        return received._replace(arguments=self._arguments(args, kwargs, outermost.replaced_by(modules)))

    def _root_of_a_part(self, run: "_Run") -> Any:
        """Builds the graph of a run on the function's side, where the run may be a part of a graph or one of results.

        Returns:
            The root of the graph, with None in the place of each missing child.

        Raises:
            SharingMismatchError: if a leaf is missing, since it came with a child that the transform left out.
        """
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
    """Packs what a function changed in place, and the modules of its result, as one graph, and divides it into groups.

    Args:
        outermost: the modules of the result, and the tree around them.
        trace: the trace, after the call of the function.
        received: what the function received.

    Returns:
        A group for each object that was changed; and the result, with groups in the place of its modules.
    """
    # Find the changed objects: `rules.updated` maps each to its record. `rules_against_leaks` makes rules under which
    # a tracer in a static leaf is an error. `lambda _: False` says that no object was donated and must come back
    # unchanged.
    rules = rules_for_state(trace.rules_against_leaks(trace.terms.rules), received.tree, lambda _: False)
    # A convention says which leaves of an object are traced. It is that of the library of the nearest module around.
    convention_of = conventions(received.tree, rules)
    # The changed objects are the first children of the graph, and the modules of the result follow.
    updated = list((rules.updated or IdentityDict[int]()).values())
    objects = [*[received.tree.objects[number] for number in updated], *outermost.objects]
    convention_of_each: list[Inherited] = [convention_of[number] for number in updated]
    convention_of_each.extend(rules.convention for _ in outermost.objects)
    # The last argument has the beginning of each object's paths in messages: nothing.
    graph = flatten_together(zip(objects, convention_of_each, strict=True), rules, [""] * len(objects))
    groups = _split(single_group_of_tree(graph))
    return _WithChanges(groups[: len(updated)], outermost.replaced_by(groups[len(updated) :]))


class _WithChanges(NamedTuple):
    """The pair that a function returns to the transform in place: groups of the objects it changed, and its result.

    For JAX it is a pytree node. A transform may return it anywhere in a tree, beside values of its own. It is found
    there by its class.

    Attributes:
        changed: a group for each changed object.
        result: the result, with groups in the place of its modules.
    """

    changed: Any
    result: Any


def _with_changes_first(result: Any, transform_name: str) -> tuple[Any, Any]:
    """Takes the changes out of the tree that a transform returned.

    Returns:
        The groups of the changed objects, and the tree with the function's own result in the place of `_WithChanges`.

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
    """Returns objects as the arguments of a call, each named by its path, so that errors show the path.

    They become the children of the graph's root.

    Args:
        owners: for each object the name of the argument that it is in.
        outermost: has the paths of the objects.
        objects: the objects.
    """
    # The name of the argument stands for the first key of a path.
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
    """A function under a transform that was never registered, and may treat each argument differently.

    So a module in two arguments is an error. An array in two arguments is two arrays inside. Ties within one argument
    stay. Otherwise a vmap with `in_axes=(0, None)` hidden in a lambda would map one occurrence of a module and not the
    other, and silently compute something else.
    """

    writes = False

    def call_in_python(self, args: Sequence[Any], kwargs: dict[str, Any], policy: Policy) -> Any:
        """Calls the transform as the base does.

        Raises:
            ValueError: if the policy is in place. The function would return its changes beside its result, and nobody
                knows whether the transform can pass them on.
        """
        if policy.in_place:
            raise ValueError(
                f"`in_place=True` adds to what a function returns, which `{self.transform_name}` may not "
                "stand: it is not registered. Say that it is a plain function transformer:\n"
                "    sharedtree.register_transform(transform)"
            )
        return super().call_in_python(args, kwargs, policy)

    def treatments(self, owners: Sequence[str]) -> Sequence[Treatment]:
        """Returns one treatment, with the name of its argument as the label of each module.

        So a module in two arguments has two labels, which is an error, and an array in two arguments is cut.
        """
        return [
            Treatment(
                "arguments",
                Branch(tuple(owners)),
                lambda label: isinstance(label, str),
                describe=lambda owner: f"in `{owner}`, whose treatment is not known",
                # The labels do not say what the transform does, so `explain` leaves them out.
                is_transform_known=False,
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
    """Tells whether the grouping of these leaves can be kept as a plan for later calls with the same structure.

    Returns:
        () if it can. None if a leaf is a reference. Where an array would be cut, a reference raises an error, and this
        is checked only while a plan is made.
    """
    return None if any(isinstance(leaf, jax.Ref) for leaf in leaves) else ()


# --- modules taken apart -----------------------------------------------------------------------------------------


class ChildGroup(LeafGroup):
    """Leaves of one child of a graph's root, without those that an earlier child has.

    The leaves of a graph in order, child after child:

        root (Net(w, a), Net(w, b))     leaves   w a b     ChildGroup(0, [w, a])     ChildGroup(1, [b])

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
        """Places of its leaves: a slice of all leaves of the graph."""
        return _places_of_children(self.structure)[self.position]

    @property
    def paths(self) -> list[str]:
        """Paths of its leaves below the child. JAX prints the path of the child before them."""
        root, _ = self.structure.records[self.structure.root]
        assert type(root) is Node
        return [path.removeprefix(str(root.keys[self.position])) for path in super().paths[self.places]]

    @property
    def is_tree(self) -> bool:
        """True if the child can be built from this group alone, and holds no object of the caller's."""
        run = _Run({self.position: self})
        is_of_other_side = any(type(op) in (Given, Update) for op, _ in run.structure.records)
        return not run.missing_places and not is_of_other_side

    def tree(self) -> Any:
        """Builds the child from this group alone. `is_tree` must be true."""
        run = _Run({self.position: self})
        return _children_of(unpack(run.structure, run.leaves))[self.position]


jtu.register_pytree_with_keys(
    ChildGroup,
    lambda group: (with_paths(group.leaves, group.paths), (group.selection, group.position)),
    lambda aux, leaves: ChildGroup(tuple(leaves), *aux),
    lambda group: (group.leaves, (group.selection, group.position)),
)


def _is_group(item: Any) -> bool:
    """Returns True for a group of this file."""
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
            # A walk numbers all that is below one child, and the child itself, before anything that is only below the
            # next one. So the leaves of the child are those with numbers up to its own, which no earlier child has.
            stop = max(start, bisect.bisect_right(numbers, child))
            places.append(slice(start, stop))
            start = stop
        places = keep(structure, "places of children", places)
    return places


def _children_of(root: Any) -> Sequence[Any]:
    """Returns the children of the root of a graph that was built."""
    node_type = node_type_of(root)
    assert node_type is not None
    return node_type.take_apart(root)[0]


class _Outermost:
    """The outermost objects of one kind in a tree, and the tree around them.

    Args:
        tree: a tree. JAX flattens it, with these objects as leaves.
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
        return cls(tree, lambda obj: has_identity_outside(obj, containers=policy.containers))

    def replaced_by(self, objects: Sequence[Any]) -> Any:
        """Builds the tree with other objects in the places of these.

        Args:
            objects: one object for each.
        """
        leaves = list(self._leaves)
        for place, obj in zip(self._places, objects, strict=True):
            leaves[place] = obj
        return self._treedef.unflatten(leaves)


# --- modules put together ----------------------------------------------------------------------------------------


class _Run:
    """Groups of one graph that are built together, for each child at most one.

    In the graph `(Net(w, a), Net(w, b))`, child 0 comes with w and a, child 1 with b alone:

        both groups          everything is there
        group 0 alone        is built as (Net(w, a), None)
        group 1 alone        the place of w is missing: it belongs to Net(w, b) and came with the other group

    Args:
        groups: position → group. At least one.

    Attributes:
        groups: position → group.
        selection: the selection of the graph.
        is_whole: True if no child is missing.
        structure: structure of the graph, with None in the place of each missing child.
        places: places of its leaves among those of the whole graph.
        leaves: the leaf at each of the places. None if the leaf came with a missing child.
        missing_places: the places of the leaves that came with a missing child.
    """

    def __init__(self, groups: Mapping[int, ChildGroup]) -> None:
        self.groups = groups
        self.selection = next(iter(groups.values())).selection
        structure = self.selection.structure
        self.is_whole = len(groups) == len(_places_of_children(structure))
        self.structure, self.places = _select(structure, tuple(sorted(groups)))
        # A child that is there may hold a leaf of a group that is not.
        leaf_at: dict[int, Any] = {}
        for group in groups.values():
            leaf_at.update(zip(range(structure.num_leaves)[group.places], group.leaves, strict=True))
        self.leaves = [leaf_at.get(place) for place in self.places]
        self.missing_places = [place for place in self.places if place not in leaf_at]


def _select(structure: Structure, positions: tuple[int, ...]) -> tuple[Structure, Sequence[int]]:
    """Returns the structure of a graph with None in the place of all children but some. Cached.

    Args:
        structure: structure of the whole graph.
        positions: positions of the children that stay.

    Returns:
        The new structure, and the places of its leaves among those of the whole graph.
    """
    children = structure.records[structure.root][1]
    if len(positions) == len(children):
        return structure, range(structure.num_leaves)
    key = "some children", positions
    selection: tuple[Structure, Sequence[int]] | None = structure.plans.get(key)
    if selection is None:
        # Find the records below the children that stay. All others become None, so that the numbers stay the same.
        *rest, (root, _) = structure.records
        selected = FlatDag([*rest, (root, tuple([children[i] for i in positions]))], structure.root).reached
        records = [record if n in selected else (Static(None), ()) for n, record in enumerate(structure.records)]
        places = [place for place, number in enumerate(structure.leaf_numbers) if number in selected]
        selection = keep(structure, key, (intern(tuple(records), structure.root), places))
    return selection


def _runs(groups: Sequence[ChildGroup]) -> list[_Run]:
    """Divides groups into runs: groups that belong to one graph and are built together.

    A transform that calls the function twice may return parts of two graphs of one structure. A shared leaf must not be
    taken from the other graph. So groups of results belong together only if they have one and the same selection. If
    JAX has cached the function's trace, both graphs have the same selection. Then the second graph begins where another
    group of a child comes that the run has already:

        groups in flatten order   0 1 0' 1'     runs   {0, 1}, {0', 1'}

    Groups of arguments belong to one call, but JAX may have kept an equal selection of an earlier call for some. So
    they belong together if they have one structure.

    Args:
        groups: the groups, in flatten order. One and the same group may come several times.
    """
    runs: list[dict[int, ChildGroup]] = []
    # Graph → its latest run, as position → group. A structure or a selection stands for the graph.
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
    """Builds the child that each group stands for. Returns the children in the order of the groups.

    Args:
        groups: the groups. One and the same group may come several times, and then its child does.
        runs: the same groups, divided into runs.
        build: run → the root of the graph built from it.
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

    Returns:
        The tree that the transform returned, with modules in it.

    Raises:
        SharingMismatchError: if the transform returned only a part of the function's results, and this part shares an
            object with the rest; or if nobody can tell which value a shared leaf has.
    """
    outermost = _Outermost(result, _is_group)
    groups = outermost.objects
    runs = _runs(groups)
    _refuse_ambiguous(runs, call)
    return outermost.replaced_by(_built(groups, runs, lambda run: _root_of_run(run, call, changes)))


def _refuse_ambiguous(runs: Sequence[_Run], call: Call) -> None:
    """Raises if nobody can tell which value a shared leaf has in a result of the transform.

    A transform may return several trees in the shape of the arguments, for example gradients and parameters. If they
    come one after the other, `[(g0, g1), (m0, m1)]`, each is a run with all children. If they come in pairs,
    `[(g0, m0), (g1, m1)]`, the runs are mixed. Then the leaf that `g1` shares with `g0` would be taken from `m0`.

    Raises:
        SharingMismatchError: if a run lacks a child, and a part of it shares a leaf with another part; or if a run has
            all children, the leaves of one are the caller's and those of another are not, and they share a leaf.
    """
    for run in runs:
        if not _is_of_arguments(run.selection.structure):
            continue
        # A run with all children may still be mixed from two results.
        if run.is_whole:
            place = _find_mixed_place(run, call)
            if place is not None:
                raise _ambiguous(run, place)
            continue
        # If the graph has several runs, a group may belong to any of them, so each must be complete by itself.
        is_only_one = [r.selection.structure for r in runs].count(run.selection.structure) == 1
        parts = [run] if is_only_one else [_Run({position: group}) for position, group in run.groups.items()]
        missing = [place for part in parts for place in part.missing_places]
        if missing:
            raise _ambiguous(run, missing[0])


def _find_mixed_place(run: _Run, call: Call) -> int | None:
    """Finds a leaf shared by two modules of a run with all children, if only one has the caller's leaves.

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
    """Makes the error for a shared leaf whose value nobody can tell.

    Args:
        run: a run of the graph.
        place: the place of the leaf.
    """
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
    """Builds the graph of a run on the caller's side.

    Args:
        run: the run.
        call: the call that ends.
        changes: collects the changes of the caller's objects. None if nothing is written back.

    Returns:
        The root of the graph, with None in the place of each missing child.

    Raises:
        SharingMismatchError: if a leaf is missing, since it came with a child that the transform left out.
    """
    structure = run.selection.structure
    if run.missing_places:
        raise SharingMismatchError(_PART_OF_RESULTS)
    # In a Jacobian, a whole tree stands in the place of a leaf, with further groups in it.
    leaves: Sequence[Any] = [
        leaf if node_type_of(leaf) is None else _put_together(leaf, call, changes) for leaf in run.leaves
    ]
    if structure is call.tree.structure:
        # A tree in the shape of the arguments, such as a gradient. The notes on their leaves hold for its leaves, too.
        leaves = distinct(leaves)
        originals = list(call.tree.leaves.values())
        hand_on([originals[place] for place in run.places], leaves)
    graph = single_group(leaves, run.structure)
    # In place, `leave` also needs functions that look up the caller's objects and take their new contents.
    return leave([graph], *(() if changes is None else (call.objects.__getitem__, changes.update)))
