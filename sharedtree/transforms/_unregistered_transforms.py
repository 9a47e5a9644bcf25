"""Transforms of functions for which there is no adapter: nobody knows how they treat arguments and results.

Such a transform gets the arguments as they are, bare arrays and plain containers, but with a leaf group in the place of
each outermost module. All modules of a call are one graph, walked once: the children of its root. The group of a child
has the leaves that no earlier child has. So a shared leaf comes with the first module that holds it:

    T(f)([Net(w), Net(w)], x)     T gets     f' and ([ChildGroup(0, [w]), ChildGroup(1, [])], x)

The modules in the function's result are a second graph, divided in the same way. The transform may return groups of
either graph, in any nesting: groups of results, and groups in the shape of arguments, such as gradients. The class of
the graph's root tells the two graphs apart: `Arguments` for arguments, a tuple for results.

The tree that the transform returns holds groups as its leaves. Some groups may be missing, and some may occur several
times. They may come from several calls of the function.

Words:
    group       a `ChildGroup`: the leaves of one child of a graph's root.
    group set   groups of one graph that are built together, at most one for each child. See `_GroupSet`.
    place       index of a leaf among all leaves of a graph.
    position    index of a child among the children of the root.
    owner       name of the argument that holds a module, such as `model` or `args[0]`.
"""

import bisect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax import tree_util as jtu

from ..core._by_identity import IdentityDict
from ..core._call_arguments import Arguments
from ..core._errors import SharingMismatchError
from ..core._node_types import LocalConvention, is_module, node_type_of
from ..core._pack_and_unpack import flat_dag_of, unpack
from ..core._prefix_trees import Branch
from ..core._sharing import with_repeats_copied
from ..core._static_values import Static
from ..core._structure import FlatDag, Given, Node, Structure, Update, intern, leaf_paths, with_paths
from ..ties._leaf_notes import are_tied_values_known, hand_on
from ..ties._policy_and_context import Policy
from ._caller_side import Call, Grouping, build_from_groups, keep, pack_call
from ._function_side import FunctionTrace, Received, receive, single_group_of_tree
from ._function_transform import FunctionTransform
from ._in_place import Changes, conventions, flatten_together, rules_for_changes
from ._leaf_groups import LeafGroup, LeafSelection, single_group
from ._leaf_labels import Treatment
from ._pass_through import has_identity_outside
from .checks._tied_values import report_tied_values


class OpaqueTransform(FunctionTransform):
    """A function under a transform of which the user says one thing: it treats all arguments alike."""

    def check_options(self) -> None:
        """Refuses options that hold a module, and lets the vanilla transform refuse other wrong options.

        A module in an option, such as `in_axes=Net(0, None)`, is a prefix tree with one label for each leaf. Nobody
        knows how to translate the labels to leaf groups.

        Raises:
            TypeError: if an option holds a module.
        """
        for name, option in self.options.items():
            if any(map(is_module, jtu.tree_leaves(option, is_leaf=is_module))):
                raise TypeError(
                    f"`{name}` has different values inside one module, but sharedtree does not know how "
                    f"`{self.transform_name}` reads `{name}`.\n"
                    "Give one value for the whole module. Or, if the transform has the options of `jax.vmap`, for "
                    "example, register it with them:\n"
                    "    sharedtree.register_transform(transform, jax.vmap)"
                )
        # The base applies the vanilla transform, which raises its own errors.
        super().check_options()

    def treatments(self, owners: Sequence[str]) -> Sequence[Treatment]:
        """Returns what the transform does to the outermost modules: nothing that tells one from another, so nothing.

        A subclass may return a `Treatment`, which gives each module a label. A module with two labels is an error.

        Args:
            owners: for each module the name of the argument that holds it.
        """
        return ()

    # The caller's side --------------------------------------------------------------------------------------------

    def call_in_python(self, args: Sequence[Any], kwargs: dict[str, Any], policy: Policy) -> Any:
        """Calls the transform with groups in the place of modules, and returns modules in the place of groups.

        In place, writes what the function changed into the caller's objects.

        Raises:
            SharingMismatchError: if the transform returned groups from which no unambiguous tree can be built.
            UntiedError: if a tie outside modules is lost, under `Policy(on_untie="error")`.
        """
        # Arrays outside modules are not packed, so a tie between them is lost inside the function. Warn of it, or raise
        # an error if the policy says so. The arguments are walked only if an array noted as tied outside modules is
        # still alive.
        if are_tied_values_known():
            arguments = flat_dag_of(self.arguments(args, kwargs), self.rules(policy))
            report_tied_values(arguments, self.names, self.transform_name, policy)
        call, outermost = self._pack_modules(args, kwargs, policy)
        # `_made` has one transformed function for each policy, so that the transform can cache traces.
        transformed = self._made.get(policy)
        if transformed is None:
            transformed = self._made.setdefault(policy, self.transform(self.inner(policy), **self.options))
        grouped = self._arguments_with_values(args, kwargs, outermost.tree_with(call.groups))
        with call:
            try:
                result = transformed(*grouped.args, **grouped.kwargs)
            except Exception as error:
                # Adds the cause to the text of the error, or raises a better error.
                self.explain(error, lambda: call)
                raise
        if not policy.in_place:
            return _replace_groups_by_modules(result, call)
        changes = Changes(call, self.transform_name)
        # The changed objects and the result are built at once, as a pair, since a changed object may be part of the
        # result. While the changed objects are built, `changes` collects their new contents. So they are not used
        # below.
        changed_and_result = _take_out_changes(result, self.transform_name)
        _, result = _replace_groups_by_modules(changed_and_result, call, changes)
        # Writes all new contents into the caller's objects.
        changes.commit()
        return result

    def enter(self, args: Sequence[Any], kwargs: dict[str, Any], policy: Policy) -> Call:
        """Packs the outermost modules, and returns the call. See the base."""
        call, _ = self._pack_modules(args, kwargs, policy)
        return call

    def _pack_modules(
        self, args: Sequence[Any], kwargs: dict[str, Any], policy: Policy
    ) -> "tuple[Call, _OutermostObjects]":
        """Packs the outermost modules as one graph.

        Returns:
            The call, with a `ChildGroup` for each module; and the modules with the tree around them.
        """
        values = (*args, *[kwargs[name] for name in sorted(kwargs)])
        outermost = _OutermostObjects.modules(values, policy)
        # A plan says how the leaves of one structure are grouped, and is kept for later calls under `key`. Under an
        # unregistered transform, a module's label is its owner, so the key has the owners.
        owners = self._owners(outermost, args, kwargs)
        key = type(self), *owners
        grouping = Grouping(self.transform_name, lambda _: self.treatments(owners), key, _no_plan_with_references)
        call = pack_call(_named_by_path(owners, outermost, outermost.objects), self.rules(policy), grouping)
        # `pack_call` got the modules alone, and grouped their leaves by label. Its labels were needed only to refuse or
        # cut shared objects. The call gets the arguments as the user wrote them, and one group for each module.
        call.arguments = self._arguments_with_values(args, kwargs, values)
        call.groups = _split_by_child(
            LeafGroup(list(call.tree.leaves.values()), LeafSelection(call.tree.structure, None, call))
        )
        return call, outermost

    def _owners(self, outermost: "_OutermostObjects", args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
        """Returns, for each module, the name of the argument that holds it.

        Args:
            outermost: the modules. The tree around them is a tuple: positional arguments, then keyword arguments sorted
                by name.
            args: positional arguments. Only their number counts.
            kwargs: keyword arguments. Only their names count.
        """
        # The first key of a module's path is the position of its argument in the tuple of all arguments.
        names = (*self.names.of(len(args)), *sorted(kwargs))
        return [names[path[0].idx] for path in outermost.paths]

    def _arguments_with_values(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], values: Sequence[Any]
    ) -> Arguments:
        """Returns arguments with the names and the order of those of a call, and with other values.

        Args:
            args: positional arguments of the call. Only their number counts.
            kwargs: keyword arguments of the call. Only their names and their order count.
            values: the new values: the positional ones, then the values of keyword arguments, sorted by name.
        """
        by_keyword = dict(zip(sorted(kwargs), values[len(args) :], strict=True))
        # A function with `**kwargs` sees the order of its keyword arguments, so the order stays.
        return Arguments(self.names.of(len(args)), values[: len(args)], {name: by_keyword[name] for name in kwargs})

    # The function's side ------------------------------------------------------------------------------------------

    def call_inside(self, trace: FunctionTrace, *args: Any, **kwargs: Any) -> Any:
        """Calls the user's function with modules in the place of groups, and returns groups in the place of modules.

        In place, returns a `_ResultWithChanges` around this result.
        """
        policy = trace.terms.policy
        received = self._receive(args, kwargs, policy)
        result = trace.call_with(received, received.arguments.args, received.arguments.kwargs)
        # Warn of ties that the function lost. In place, the arguments are checked beside the result.
        trace.check_flattened(trace.flatten(trace.with_arguments(result)), is_with_arguments=bool(policy.in_place))
        # The modules of the result are the children of the second graph.
        outermost = _OutermostObjects.modules(result, policy)
        if not policy.in_place:
            return outermost.tree_with(_split_by_child(single_group_of_tree(trace.flatten(tuple(outermost.objects)))))
        return _pack_with_changes(outermost, trace, received)

    def _receive(self, args: Sequence[Any], kwargs: Mapping[str, Any], policy: Policy) -> Received:
        """Builds the arguments of the function from what the transform passes to it.

        The function gets modules in the place of groups. If the transform passes on all groups of one call and no
        others, the modules are built from all groups at once. Otherwise each group set is built by itself. Then nothing
        can be written back, so in place that is an error.

        Args:
            args: positional arguments from the transform, with groups in them.
            kwargs: keyword arguments from the transform.
            policy: what carries identity.

        Returns:
            What the function receives.

        Raises:
            SharingMismatchError: if the transform left out a group with an array that a module needs; or if what the
                function changes in place could not be written back.
        """
        outermost = _OutermostObjects((*args, *[kwargs[name] for name in sorted(kwargs)]), _is_group)
        group_sets = _group_sets(outermost.objects)
        # The usual case: the transform passes on all groups of the call, and perhaps one of them several times.
        if len(group_sets) == 1 and group_sets[0].is_whole and _is_graph_of_arguments(group_sets[0].structure):
            received = receive([LeafGroup(group_sets[0].leaves, group_sets[0].selection)])
            modules = [received.arguments.args[group.position] for group in outermost.objects]
        elif group_sets and policy.in_place:
            raise SharingMismatchError(_NOT_WRITTEN_BACK.format(self.transform_name))
        else:
            modules = _build_children(outermost.objects, group_sets, self._build_for_function)
            by_path = _named_by_path(self._owners(outermost, args, kwargs), outermost, modules)
            # The third field is the call. It is not known to which call the modules belong.
            received = Received(flat_dag_of(by_path, self.rules(policy)), by_path, None)
        return received._replace(arguments=self._arguments_with_values(args, kwargs, outermost.tree_with(modules)))

    def _build_for_function(self, group_set: "_GroupSet") -> Any:
        """Builds the graph of a group set, for the user's function.

        The graph may be one of arguments, or one of results if the transform passes on an earlier result.

        Returns:
            The root of the graph, with None in the place of each missing child.

        Raises:
            SharingMismatchError: if a leaf is missing, since it belongs to a group that the transform left out.
        """
        if group_set.missing_places and not _is_graph_of_arguments(group_set.structure):
            raise _part_of_results_error(group_set)
        if group_set.missing_places:
            path = leaf_paths(group_set.selection.structure)[group_set.missing_places[0]]
            raise SharingMismatchError(
                f"`{self.transform_name}` drops an argument that shares `{path}` with another one, which it passes to "
                "the function.\n"
                "An array that several arguments share is passed with the first of them only. Pass these arguments as "
                "one value, whose `.tree` is the pair in the function:\n"
                "    f(sharedtree.Dag((model, shared)))"
            )
        return unpack(group_set.structure, group_set.leaves)


def _pack_with_changes(
    outermost: "_OutermostObjects", trace: FunctionTrace, received: Received
) -> "_ResultWithChanges":
    """Packs the objects that a function changed in place and the modules of its result as one graph, for the transform.

    Args:
        outermost: the modules of the result, and the tree around them.
        trace: the trace, after the call of the function.
        received: what the function received.

    Returns:
        A group for each changed object; and the result, with groups in the place of its modules.
    """
    # Find the changed objects: `rules.updated` maps each to its record. `rules_against_leaks` makes rules under which
    # a tracer in a static leaf is an error. `lambda _: False` says that no object was taken over (donated).
    rules = rules_for_changes(trace.rules_against_leaks(trace.terms.rules), received.tree, lambda _: False)
    # A convention says which leaves of an object are traced. Each library has its own, such as Equinox or Flax. An
    # object has the convention of the nearest module that holds it.
    convention_of = conventions(received.tree, rules)
    # The changed objects are the first children of the graph, and the modules of the result follow.
    updated = list((rules.updated or IdentityDict[int]()).values())
    objects = [*[received.tree.objects[number] for number in updated], *outermost.objects]
    convention_of_objects: list[LocalConvention] = [convention_of[number] for number in updated]
    convention_of_objects.extend(rules.convention for _ in outermost.objects)
    # The last argument has the text with which each object's paths begin in messages: none.
    graph = flatten_together(zip(objects, convention_of_objects, strict=True), rules, [""] * len(objects))
    groups = _split_by_child(single_group_of_tree(graph))
    return _ResultWithChanges(groups[: len(updated)], outermost.tree_with(groups[len(updated) :]))


class _ResultWithChanges(NamedTuple):
    """The pair that a function returns to the transform in place: groups of the objects it changed, and its result.

    As a NamedTuple, it is a pytree node for JAX. A transform may return it anywhere in a tree, beside values of its
    own. `_take_out_changes` finds it there by its class.

    Attributes:
        changed: a group for each changed object.
        result: the result, with groups in the place of its modules.
    """

    changed: Any
    result: Any


def _take_out_changes(result: Any, transform_name: str) -> tuple[Any, Any]:
    """Takes the changes out of the tree that a transform returned.

        (0.5, _ResultWithChanges(changed, result))     →     changed, (0.5, result)

    Returns:
        The groups of the changed objects; and the tree, with the function's own result in the place of the
        `_ResultWithChanges`.

    Raises:
        SharingMismatchError: if the tree holds a `_ResultWithChanges` several times or not at all.
    """
    leaves, treedef = jtu.tree_flatten(result, is_leaf=lambda obj: isinstance(obj, (_ResultWithChanges, ChildGroup)))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, _ResultWithChanges)]
    if len(places) != 1:
        raise SharingMismatchError(_NOT_RETURNED_ONCE.format(transform_name))
    changed, leaves[places[0]] = leaves[places[0]]
    return changed, treedef.unflatten(leaves)


_NOT_RETURNED_ONCE = (
    "`{0}` drops the function's result, or returns it twice, so `in_place=True` cannot write changes back.\n"
    "Let `f` return the objects that it changes, as `return result, model`, and switch `in_place` off:\n"
    "    f = sharedtree.preserve_identities(transform, in_place=False)(f)"
)


def _named_by_path(owners: Sequence[str], outermost: "_OutermostObjects", objects: Sequence[Any]) -> Arguments:
    """Makes the root of a graph: an `Arguments` with each object as one argument, named by its path.

    So each object is a child of the root, and errors show its path.

    Args:
        owners: for each object the name of the argument that holds it.
        outermost: what stands at the paths: the objects themselves, or the groups from which they were built.
        objects: the objects.
    """
    # The first key of a path is the position of the argument. The name takes its place: "[0].layers" → "net.layers".
    paths = [owner + jtu.keystr(path[1:]) for owner, path in zip(owners, outermost.paths, strict=True)]
    return Arguments(tuple(paths), objects, {})


_PART_OF_RESULTS = (
    "`{0}` was left out: the transform returned only a part of the function's result, and this object belongs to "
    "that part and to the one left out.\n"
    "An object that several parts share comes back with the first of them only. Let the function return these parts as "
    "one value:\n"
    "    return sharedtree.Dag((model, shared))"
)

_NOT_WRITTEN_BACK = (
    "`{0}` drops an argument of the function, or passes one twice, so `in_place=True` cannot write changes back.\n"
    "Let `f` return the objects that it changes, as `return result, model`, and switch `in_place` off:\n"
    "    f = sharedtree.preserve_identities(transform, in_place=False)(f)"
)


class UnregisteredTransform(OpaqueTransform):
    """A function under a transform that was never registered, and may treat each argument differently.

    A module in two arguments is an error. An array in two arguments is two arrays inside. Ties within one argument
    stay. The reason for the error: with `transform = lambda f: jax.vmap(f, in_axes=(0, None))`, one occurrence of the
    module would be mapped and the other one not, and the result would silently be wrong.
    """

    # The transform cannot write changes back (see the base).
    writes = False

    def call_in_python(self, args: Sequence[Any], kwargs: dict[str, Any], policy: Policy) -> Any:
        """Calls the transform as the base does.

        Raises:
            ValueError: if the policy is in place. The function would return its changes beside its result, and nobody
                knows whether the transform can pass them on.
        """
        if policy.in_place:
            raise ValueError(
                f"`{self.transform_name}` cannot be used with `in_place=True`, because it is not registered.\n"
                "With `in_place=True` the function returns its changes besides its result. If the transform can handle "
                "a function with any result, register it:\n"
                "    sharedtree.register_transform(transform)"
            )
        return super().call_in_python(args, kwargs, policy)

    def treatments(self, owners: Sequence[str]) -> Sequence[Treatment]:
        """Returns one treatment, with the name of its argument as the label of each module.

        A module in two arguments has two labels, which is an error. An array in two arguments becomes two arrays.
        """
        return [
            Treatment(
                "arguments",
                Branch(tuple(owners)),
                lambda label: isinstance(label, str),
                describe=lambda owner: f"in the argument `{owner}`",
                # The labels do not say what the transform does, so `explain` leaves them out.
                is_transform_known=False,
                advice=lambda _: (
                    "The transform is not registered, so it may map or differentiate some arguments and not others. If "
                    "it treats all alike, register it. If it has the options of a known transform, add that one, as "
                    "in `register_transform(transform, jax.vmap)`:\n"
                    "    sharedtree.register_transform(transform)\n"
                ),
            )
        ]


def _no_plan_with_references(leaves: Sequence[Any]) -> tuple[()] | None:
    """Returns None if a leaf is a reference, so that no plan is kept. Returns () otherwise.

    A reference in two arguments raises an error, where an array would become two. This is checked only while a plan is
    made, and a plan is kept for a structure, which does not tell references from arrays.
    """
    return None if any(isinstance(leaf, jax.Ref) for leaf in leaves) else ()


# --- the groups of a graph, and the tree around them --------------------------------------------------------------


class ChildGroup(LeafGroup):
    """Leaves of one child of a graph's root, without those that an earlier child has.

    The leaves of a graph in order, child after child:

        root (Net(w, a), Net(w, b))     leaves   w a b     ChildGroup(0, [w, a])     ChildGroup(1, [b])

    Args:
        leaves: the leaves, in the order of the graph.
        selection: selection of all leaves of the graph. Groups with one selection belong to one graph.
        position: position of the child among the children of the root.
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
        # `super().paths` has the paths of all leaves of the graph, from the root.
        return [path.removeprefix(str(root.keys[self.position])) for path in super().paths[self.places]]

    @property
    def is_tree(self) -> bool:
        """True if the child can be built from this group alone, and the group refers to no object of the caller's."""
        group_set = _GroupSet({self.position: self})
        refers_to_caller = any(type(op) in (Given, Update) for op, _ in group_set.structure.records)
        return not group_set.missing_places and not refers_to_caller

    def tree(self) -> Any:
        """Builds the child from this group alone. `is_tree` must be true."""
        group_set = _GroupSet({self.position: self})
        return _children_of(unpack(group_set.structure, group_set.leaves))[self.position]


# The four functions: children with their keys and aux data, the inverse, and the children without keys.
jtu.register_pytree_with_keys(
    ChildGroup,
    lambda group: (with_paths(group.leaves, group.paths), (group.selection, group.position)),
    lambda aux, leaves: ChildGroup(tuple(leaves), *aux),
    lambda group: (group.leaves, (group.selection, group.position)),
)


def _is_group(item: Any) -> bool:
    """Returns True for a `ChildGroup`."""
    return isinstance(item, ChildGroup)


def _split_by_child(graph: LeafGroup) -> list[LeafGroup]:
    """Divides all leaves of a graph into one group for each child of its root."""
    slices = _places_of_children(graph.structure)
    return [ChildGroup(graph.leaves[places], graph.selection, position) for position, places in enumerate(slices)]


def _places_of_children(structure: Structure) -> Sequence[slice]:
    """Returns, for each child of the root, the places of the leaves that no earlier child has. Cached in the structure.

    root (Net(w, a), Net(w, b))     leaves   w a b     →     slice(0, 2), slice(2, 3)
    """
    places: list[slice] | None = structure.plans.get("places of children")
    if places is None:
        places, start, numbers = [], 0, structure.leaf_numbers
        _, children = structure.records[structure.root]
        for child in children:
            # A walk numbers records in post-order: first all records below a child, then the child itself, then the
            # records that only the next child has. So a child has the leaves with lower numbers than its own that no
            # earlier child has. A child may also be below an earlier one. Then it has a lower number than that one, and
            # no leaves of its own: `max` gives it an empty slice.
            stop = max(start, bisect.bisect_right(numbers, child))
            places.append(slice(start, stop))
            start = stop
        # Stores the list in `plans` and returns it, or the list of another thread that came first.
        places = keep(structure, "places of children", places)
    return places


def _children_of(root: Any) -> Sequence[Any]:
    """Returns the children of the root of a graph that was built: the arguments, or the entries of the tuple."""
    node_type = node_type_of(root)
    assert node_type is not None
    children, *_ = node_type.take_apart(root)
    return children


class _OutermostObjects:
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
    def modules(cls, tree: Any, policy: Policy) -> "_OutermostObjects":
        """Finds the outermost modules of a tree.

        Under `Policy(containers=True)`, also the outermost mutable containers: they carry identity as modules do.
        """
        return cls(tree, lambda obj: has_identity_outside(obj, containers=policy.containers))

    def tree_with(self, objects: Sequence[Any]) -> Any:
        """Builds the tree with another object in the place of each of `self.objects`.

        Args:
            objects: the other objects, in flatten order.
        """
        leaves = list(self._leaves)
        for place, obj in zip(self._places, objects, strict=True):
            leaves[place] = obj
        return self._treedef.unflatten(leaves)


# --- modules built from groups ------------------------------------------------------------------------------------


class _GroupSet:
    """Groups of one graph that are built together, at most one for each child.

    In the graph `(Net(w, a), Net(w, b))`, group 0 has the leaves w and a, group 1 has b alone:

        both groups          everything is there
        group 0 alone        is built as (Net(w, a), None)
        group 1 alone        w is missing: `Net(w, b)` needs it, but it is in group 0

    Args:
        groups: position → group. At least one. All belong to one graph.

    Attributes:
        groups: position → group.
        selection: the selection of the graph.
        is_whole: True if there is a group for each child of the graph.
        structure: structure of the graph, with None in the place of each child without a group.
        places: for each leaf of `structure`, its place among the leaves of the whole graph.
        leaves: the leaf at each of the places. None if it is in a group that is missing.
        missing_places: the places of the leaves that are in missing groups.
    """

    def __init__(self, groups: Mapping[int, ChildGroup]) -> None:
        self.groups = groups
        self.selection = next(iter(groups.values())).selection
        structure = self.selection.structure
        self.is_whole = len(groups) == len(_places_of_children(structure))
        self.structure, self.places = _partial_structure(structure, tuple(sorted(groups)))
        # `group.places` is a slice of all places. A child may also hold leaves that are in the group of another child,
        # which may be missing: their places are not in `leaf_at`.
        leaf_at: dict[int, Any] = {}
        all_places = range(structure.num_leaves)
        for group in groups.values():
            leaf_at.update(zip(all_places[group.places], group.leaves, strict=True))
        self.leaves = [leaf_at.get(place) for place in self.places]
        self.missing_places = [place for place in self.places if place not in leaf_at]


def _partial_structure(structure: Structure, positions: tuple[int, ...]) -> tuple[Structure, Sequence[int]]:
    """Returns the structure of a graph in which only some children of the root stay. Cached in the structure.

        structure     (Net(w, a), Net(w, b), 3)        positions   0, 2
        result        (Net(w, a), None, 3)             places      those of w and a

    A child at another position becomes None, unless a child that stays holds it, too.

    Args:
        structure: structure of the whole graph.
        positions: positions of the children that stay.

    Returns:
        The new structure, and for each of its leaves the place among the leaves of the whole graph.
    """
    _, children = structure.records[structure.root]
    if len(positions) == len(children):
        return structure, range(structure.num_leaves)
    key = "some children", positions
    partial: tuple[Structure, Sequence[int]] | None = structure.plans.get(key)
    if partial is None:
        # Find the records below the children that stay, with a root that has no other children. The root is the last
        # record.
        *below_root, (root_op, _) = structure.records
        children_that_stay = tuple([children[position] for position in positions])
        stay = FlatDag([*below_root, (root_op, children_that_stay)], structure.root).reached
        # All other records become None and are not removed, so that the numbers of records stay the same.
        records = [record if n in stay else (Static(None), ()) for n, record in enumerate(structure.records)]
        places = [place for place, number in enumerate(structure.leaf_numbers) if number in stay]
        partial = keep(structure, key, (intern(tuple(records), structure.root), places))
    return partial


def _group_sets(groups: Sequence[ChildGroup]) -> list[_GroupSet]:
    """Divides groups into group sets, each of which is built by itself.

    Groups of results: a transform that calls the function twice may return groups of two graphs of one structure. A
    shared leaf must not be taken from the other graph. So groups belong together only if they have one and the same
    selection object. If JAX has cached the function's trace, both graphs have the same selection. Then a new group set
    begins with the first group at a position for which the set has another group already:

        positions in flatten order   0 1 0' 1'     sets   {0, 1}, {0', 1'}

    Groups of arguments belong together if they have one structure. They are all of one call, but JAX may have kept
    an equal selection of an earlier call for some of them.

    Args:
        groups: the groups, in flatten order. One object may occur several times among them.
    """
    group_sets: list[dict[int, ChildGroup]] = []
    # Graph → its latest group set, as position → group. The graph is known by its structure or its selection.
    latest: IdentityDict[dict[int, ChildGroup]] = IdentityDict()
    for group in groups:
        graph = group.structure if _is_graph_of_arguments(group.structure) else group.selection
        group_set = latest.get(graph)
        if group_set is None or group_set.get(group.position, group) is not group:
            group_set = latest[graph] = {}
            group_sets.append(group_set)
        group_set[group.position] = group
    return [_GroupSet(group_set) for group_set in group_sets]


def _is_graph_of_arguments(structure: Structure) -> bool:
    """Returns True for a graph of arguments, False for a graph of results, whose root is a tuple."""
    op, _ = structure.records[structure.root]
    return type(op) is Node and op.type.cls is Arguments


def _build_children(
    groups: Sequence[ChildGroup], group_sets: Sequence[_GroupSet], build: Callable[[_GroupSet], Any]
) -> list[Any]:
    """Builds the child that each group stands for. Returns the children in the order of the groups.

    Args:
        groups: the groups. If one object occurs several times among them, so does its child in the result.
        group_sets: the same groups, divided into group sets.
        build: group set → the root of the graph built from it.
    """
    child_of: IdentityDict[Any] = IdentityDict()
    for group_set in group_sets:
        children = _children_of(build(group_set))
        for position, group in group_set.groups.items():
            child_of[group] = children[position]
    return [child_of[group] for group in groups]


def _replace_groups_by_modules(result: Any, call: Call, changes: Changes | None = None) -> Any:
    """Puts modules in the place of the groups that a transform returned, and of groups among their leaves.

    Args:
        result: what the transform returned.
        call: the call that ends.
        changes: collects the new contents of the caller's objects. None if nothing is written back.

    Returns:
        The tree that the transform returned, with modules in it.

    Raises:
        SharingMismatchError: if the transform returned only a part of the function's result, and this part shares a
            leaf with the rest; or if nobody can tell which value a shared leaf has.
    """
    outermost = _OutermostObjects(result, _is_group)
    groups = outermost.objects
    group_sets = _group_sets(groups)
    _refuse_ambiguous_leaves(group_sets, call)
    return outermost.tree_with(
        _build_children(groups, group_sets, lambda group_set: _build_for_caller(group_set, call, changes))
    )


def _refuse_ambiguous_leaves(group_sets: Sequence[_GroupSet], call: Call) -> None:
    """Raises if nobody can tell which value a shared leaf has in a result of the transform.

    A transform may return several trees in the shape of the arguments. Let `m0` and `m1` be the groups of two modules
    that share a leaf, and `g0` and `g1` the groups of their gradients. The shared leaf comes in `m0` and `g0`.

        returned                   group sets                        value of the shared leaf in g1
        [(g0, g1), (m0, m1)]       {g0, g1}, {m0, m1}                that in g0, which is right
        [(g0, m0), (g1, m1)]       {g0}, {m0, g1}, {m1}              that in m0, which is wrong: raises

    Graphs of results are left out: their groups are told apart by their selections.

    Args:
        group_sets: the group sets in the tree that the transform returned.
        call: the call that ends.

    Raises:
        SharingMismatchError: if a group set without all children lacks a leaf; if one of several such sets of one
            structure has a group that cannot be built alone; or if a set with all children mixes the caller's
            modules with new ones, and two of them share a leaf.
    """
    for group_set in group_sets:
        if not _is_graph_of_arguments(group_set.selection.structure):
            continue
        # A set with all children may still be mixed from two trees.
        if group_set.is_whole:
            place = _find_mixed_leaf(group_set, call)
            if place is not None:
                raise _ambiguous_leaf_error(group_set, place)
            continue
        # If there are several sets of this structure, a group may belong to any of them. Then each group must be
        # complete by itself.
        structures = [other_set.selection.structure for other_set in group_sets]
        is_only_one = structures.count(group_set.selection.structure) == 1
        single_groups = group_set.groups.items()
        parts = [group_set] if is_only_one else [_GroupSet({position: group}) for position, group in single_groups]
        missing_places = [place for part in parts for place in part.missing_places]
        if missing_places:
            raise _ambiguous_leaf_error(group_set, missing_places[0])


def _find_mixed_leaf(group_set: _GroupSet, call: Call) -> int | None:
    """Finds a leaf shared by a module with the caller's leaves and a module with new leaves.

    A transform may return the parameters of one module and the gradient of another. Together they look like one tree,
    and the leaf in the group of the first would be put into the second, too.

    Args:
        group_set: a group set with all children.
        call: the call that ends. Its leaves are the caller's.

    Returns:
        The place of the leaf in the graph. None if there is none, or if the graph is not that of this call.
    """
    if group_set.selection.structure is not call.tree.structure:
        return None
    callers_leaves = list(call.tree.leaves.values())
    # 1. Find out for each group whether all of its leaves are the caller's. An empty group says nothing.
    all_places = range(len(callers_leaves))
    places_of = {position: all_places[group.places] for position, group in group_set.groups.items()}
    is_unchanged_at: dict[int, bool] = {}
    for position, group in group_set.groups.items():
        if places_of[position]:
            pairs = zip(group.leaves, places_of[position], strict=True)
            is_unchanged_at[position] = all(leaf is callers_leaves[place] for leaf, place in pairs)
    if len(set(is_unchanged_at.values())) < 2:
        return None
    # 2. A module needs its own group, and perhaps leaves that are in the groups of earlier modules. Find such a leaf in
    # a group that is unchanged while the module's own is not, or the other way round.
    holder_of = {place: position for position, places in places_of.items() for place in places}
    for position, is_unchanged in is_unchanged_at.items():
        places_in_other_groups = _GroupSet({position: group_set.groups[position]}).missing_places
        for place in places_in_other_groups:
            if is_unchanged_at[holder_of[place]] != is_unchanged:
                return place
    return None


def _ambiguous_leaf_error(group_set: _GroupSet, place: int) -> SharingMismatchError:
    """Makes the error for a shared leaf whose value nobody can tell.

    Args:
        group_set: a group set of the graph.
        place: the place of the leaf in the graph.
    """
    path = leaf_paths(group_set.selection.structure)[place]
    return SharingMismatchError(
        f"The arguments share `{path}`, and the transform returns several values for each argument, such as a "
        "gradient and the argument itself. sharedtree cannot tell in which of them this array is.\n"
        "An array that several arguments share comes back with the first of them only. Pass these arguments as one "
        "value, whose `.tree` is the pair:\n"
        "    f(sharedtree.Dag((model, shared)))",
        (path,),
    )


def _part_of_results_error(group_set: _GroupSet) -> SharingMismatchError:
    """Makes the error for a result of which the transform has returned only a part, which lacks a leaf."""
    path = leaf_paths(group_set.selection.structure)[group_set.missing_places[0]]
    return SharingMismatchError(_PART_OF_RESULTS.format(f"result{path}" if path[:1] in (".", "[") else path))


def _build_for_caller(group_set: _GroupSet, call: Call, changes: Changes | None) -> Any:
    """Builds the graph of a group set, for the caller.

    Args:
        group_set: the group set.
        call: the call that ends.
        changes: collects the new contents of the caller's objects. None if nothing is written back.

    Returns:
        The root of the graph, with None in the place of each missing child.

    Raises:
        SharingMismatchError: if a leaf is missing, since it belongs to a group that the transform left out.
    """
    structure = group_set.selection.structure
    if group_set.missing_places:
        raise _part_of_results_error(group_set)

    # In a Jacobian, a whole tree stands in the place of a leaf, with further groups in it. For JAX's arrays and other
    # leaves, `node_type_of` returns None.
    def with_modules(leaf: Any) -> Any:
        return leaf if node_type_of(leaf) is None else _replace_groups_by_modules(leaf, call, changes)

    leaves: Sequence[Any] = list(map(with_modules, group_set.leaves))
    if structure is call.tree.structure:
        # A tree in the shape of the arguments, such as a gradient. If the transform returned one array for two leaves,
        # `with_repeats_copied` copies it. `hand_on` copies the notes on the caller's leaves (such as that a tie was
        # undone on purpose) to the new leaves.
        leaves = with_repeats_copied(leaves)
        callers_leaves = list(call.tree.leaves.values())
        hand_on([callers_leaves[place] for place in group_set.places], leaves)
    graph = single_group(leaves, group_set.structure)
    # In place, `build_from_groups` also needs functions that look up the caller's objects and take their new contents.
    return build_from_groups([graph], *(() if changes is None else (call.objects.__getitem__, changes.update)))
