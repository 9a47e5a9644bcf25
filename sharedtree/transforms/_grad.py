"""`jax.grad`, `jax.value_and_grad`, Jacobians, and their Equinox counterparts.

In a differentiated module, only the inexact traced leaves (floating point or complex) are differentiated. The leaves of
a call form two *leaf groups*, the two arguments of the transform: the first group is passed to the function
undifferentiated, the second is differentiated. A leaf at several paths is in a group once. The gradient is a module of
the same shape and sharing, with `None` for leaves without a gradient. A Jacobian has the shape of the function's
result, and a gradient in the place of each of its leaves.

    f(Net(w, [w, 3]), x)     groups [x] and [w]      gradient [g]      Net(g, [g, None])

The packed arguments have one *record* for each object, even if it is at several paths: its operation (`LEAF`, a static
value, or the class of a node) and the numbers of its children's records. A variable `record` holds the record's number.

A *prefix* is a tree in the shape of the arguments' upper part. Here its entries are True for leaves to be
differentiated, and False. An entry holds for everything below it.

A `jax.Ref` is a place and not a value, so it has no gradient. Equinox's transforms pass references to the function
without differentiating them, and their gradient is None. We do the same, and also under JAX's transforms for references
in Equinox modules. In other modules JAX refuses a reference, or fails when the function reads or writes it.

    Net(w, count=Ref)     Equinox's grad: Net(g, count=None)       `jax.grad`: an error
"""

import functools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ..core._call_arguments import Arguments, positions_of
from ..core._jax_internals import ConcreteArray
from ..core._node_types import is_module, is_traced
from ..core._prefix_trees import Branch
from ..core._printing import listed, shown
from ..core._sharing import pairs_of_one_shape
from ..core._structure import FlatDag, Node
from ..optim._wrt import OF_GRAD, require_no_prefix_filter, require_nothing_left, select_everywhere
from ..ties._list_ties import is_inexact
from ..ties._policy_and_context import Policy
from ..tree._asking_filters import selection
from ..tree._filters import Filter, LeafPlace, filter_of
from ._adapter_names import COUNTERPART_OF_FILTER
from ._argument_names import as_sequence
from ._caller_side import Call, Grouping, build_from_groups
from ._function_side import FunctionTrace, single_group_of_tree
from ._function_transform import FunctionTransform
from ._grouping_leaves import outermost_modules
from ._in_place import commit_changes, conventions, flatten_with_changes
from ._leaf_groups import LeafGroup, tree_like_arguments
from ._leaf_labels import Outcomes, Treatment
from .checks._optimizers_of_nnx import report_filter_of_gradient
from .checks._partial_gradients import Gradient, report_partial_gradients

_TRANSFORMS_REFUSING_REFERENCES = ("jax.grad", "jax.value_and_grad", "jax.jacrev", "jax.hessian")
"""Names of the transforms of JAX that raise an error for a differentiated `jax.Ref`."""

_NAMES_IN_SHAREDTREE = {
    "jax.grad": "grad",
    "equinox.filter_grad": "grad",
    "jax.value_and_grad": "value_and_grad",
    "equinox.filter_value_and_grad": "value_and_grad",
}
"""Name of a transform → name of the function in `sharedtree` that is this transform with identities preserved."""


class GradTransform(FunctionTransform):
    """A function under `jax.grad` or `equinox.filter_grad`, with identities preserved.

    The option `wrt` is a filter of sharedtree's own: it selects the leaves of the differentiated arguments that are
    differentiated. Without it, all inexact leaves are.
    """

    calls_each_time = True
    package_options = frozenset({"wrt"})
    differentiates = True
    packs_value = False
    """True if the inner function returns its value as a leaf group. False if it returns the value itself, a scalar."""
    returns_value = False
    """True if the transform returns the pair (value, gradient), and not the gradient alone."""

    def check_options(self) -> None:
        """Reads the options into attributes. Wrong ones raise an error, most of them the vanilla transform's own."""
        options = self.all_options
        argnums = options.get("argnums", 0)
        # Raises if `argnums` is a library's object for an argument and a filter, such as `nnx.DiffState`.
        require_no_prefix_filter(argnums)
        wrt = options.get("wrt")
        self._filter = None if wrt is None else filter_of(wrt, OF_GRAD)
        self._argnums = tuple(as_sequence(argnums))
        # `argnums=0` returns one gradient, `argnums=(0,)` a tuple.
        self._has_single_argnum = not np.ndim(argnums)
        self._has_aux = options.get("has_aux", False)
        self._allow_int = options.get("allow_int", False)
        # Not all releases of JAX take NumPy's integers. `_argnums` has Python's.
        if "argnums" in options:
            self.options = {**self.options, "argnums": self._argnums[0] if self._has_single_argnum else self._argnums}
        super().check_options()

    # ---- Which leaves are differentiated ----

    def differentiated_positions(self, num_args: int) -> list[int]:
        """Positions of the differentiated arguments in a call, in order, without positions beyond its arguments.

        Args:
            num_args: number of positional arguments in the call.
        """
        # A negative position counts from the last argument.
        positions = {i + num_args if i < 0 else i for i in self._argnums}
        return sorted([i for i in positions if 0 <= i < num_args])

    def grouping(self, policy: Policy, arguments: Arguments) -> Grouping:
        """Returns how leaves are grouped: a group without differentiation, and then the differentiated group."""
        prefix = self._prefix(arguments)

        def treatments(tree: FlatDag) -> Sequence[Treatment]:
            """Returns the only treatment. The outcome of a leaf is True if it is differentiated.

            Args:
                tree: the packed arguments.
            """
            # Records of the leaves that only plain containers hold, below the differentiated arguments. They are
            # differentiated whatever they are, since JAX refuses integers itself. Equinox and `wrt` skip integers.
            outside_modules = set[int]()
            if not (self.is_filtered or self._filter is not None):
                children = tree.records[tree.root][1]
                # Without `wrt`, each part of the prefix is True or False for a whole argument.
                roots = [child for child, is_selected in zip(children, prefix.parts, strict=True) if is_selected]
                outside_modules.update(*[tree.below(root).outside for root in roots])
            undifferentiated = undifferentiated_records(tree, self.rules(policy))
            can_differentiate = functools.partial(_can_be_differentiated, allow_int=self._allow_int)

            def resolve(is_selected: bool, leaf: Any, record: int) -> bool:
                if not is_selected or record in undifferentiated:
                    return False
                return record in outside_modules or can_differentiate(leaf)

            return (
                Treatment(
                    name="wrt",
                    prefix=prefix,
                    is_label=lambda part: isinstance(part, bool),
                    resolve=resolve,
                    describe=lambda is_differentiated: "differentiated" if is_differentiated else "not differentiated",
                    groups_by_outcome=True,
                    advice=lambda leaves: self._advice(arguments, leaves),
                    splittable_modules=modules_used_twice,
                    has_containers=policy.containers,
                ),
            )

        return Grouping(
            self.transform_name,
            treatments,
            key=("wrt", prefix, self._allow_int, self._filter is not None, self.is_filtered),
            facts_of_leaves=functools.partial(_differentiability, allow_int=self._allow_int),
            # Both groups exist in every call, so that the second argument is always the differentiated one.
            groups=((False,), (True,)),
            # A filter may answer differently for the next model, so C must not group the leaves by this prefix.
            holds_for_like_calls=self._filter is None,
        )

    def _prefix(self, arguments: Arguments) -> Branch:
        """Makes the prefix tree of all arguments: True where `argnums` and `wrt` select, otherwise False."""
        differentiated = self.differentiated_positions(len(arguments.args))
        # For each argument in the graph: its index, or its name if it was passed by keyword.
        positions = positions_of(arguments.parts()[1])
        if self._filter is None:
            return Branch(tuple([position in differentiated for position in positions]))
        # For each differentiated argument, the part of the prefix for it: True, False or a tree of them.
        selections = {i: selection(arguments.args[i], self._filter, self.names.text(i)) for i in differentiated}
        # A keyword argument is never differentiated.
        return Branch(tuple([selections.get(i, False) if isinstance(i, int) else False for i in positions]))

    def _advice(self, arguments: Arguments, leaves: Sequence[Any]) -> str:
        """Writes the fix for leaves that `wrt` selects at some of their paths only. Empty without `wrt`."""
        if self._filter is None:
            return ""
        return select_everywhere(self._differentiated_arguments(arguments), self._filter, leaves)

    def _differentiated_arguments(self, arguments: Arguments) -> list[Any]:
        return [arguments.args[i] for i in self.differentiated_positions(len(arguments.args))]

    # ---- The caller's side ----

    def enter(self, args: Sequence[Any], kwargs: dict[str, Any], policy: Policy) -> Call:
        """Packs the arguments of a call, groups their leaves, and returns the call.

        Warns if a tie between a differentiated leaf and another one is cut, since the gradient will then lack a part.

        Raises:
            TypeError: if a `jax.Ref` in a module would be differentiated, and the transform cannot do so.
            ValueError: if `wrt` selects no leaf, although it could.
        """
        # If an argument of `argnums` is missing, the transform raises its own error.
        if len(self.differentiated_positions(len(args))) < len(set(self._argnums)):
            self.raise_vanilla_error(args, kwargs)
        call = super().enter(args, kwargs, policy)
        positions = self.differentiated_positions(len(args))
        # Warn of a filter that NNX's optimizer would ask about another path.
        if self._filter is not None and self._filter.asks_for_path:
            root = call.tree.root
            models = [call.tree.below(call.tree.records[root][1][i]) for i in positions]
            report_filter_of_gradient(self.function, models, self.all_options["wrt"], self._filter, policy)
        # Warn of parts that the gradient will lack.
        if call.plan.cuts:
            gradient = Gradient(
                positions,
                self._function_as_code(),
                self._transform_as_code(policy),
                lambda leaves: self._advice(call.arguments, leaves),
            )
            report_partial_gradients(call, gradient, self.names, policy)
        forbid_references(call, self._differentiated_arguments(call.arguments), self.transform_name)
        # The second group, which is differentiated, is empty: the filter selects nothing.
        if self._filter is not None and not call.groups[1].leaves:
            differentiated = self._differentiated_arguments(call.arguments)
            can_differentiate = functools.partial(_can_be_differentiated, allow_int=self._allow_int)
            # Raises if there is a leaf that the filter could have selected.
            require_nothing_left(differentiated, can_differentiate, self.all_options["wrt"])
        return call

    def _function_as_code(self) -> str:
        """Name of the user's function in the code of a warning. It is `f` for a lambda or an object without a name."""
        name = getattr(self.function, "__name__", "")
        return name if name.isidentifier() else "f"

    def _transform_as_code(self, policy: Policy) -> str:
        """Writes the code of this transform, with `{}` for the function and for more options.

        For example, `sharedtree.grad({}, has_aux=True{})`. Then `argnums` is among the options to be filled in.
        """
        options = "".join(f", {name}={value!r}" for name, value in self.options.items() if name != "argnums")
        options += ", wrt=wrt" if self._filter is not None else ""
        options += ", policy=sharedtree.Policy(containers=True)" if policy.containers else ""
        name = _NAMES_IN_SHAREDTREE.get(self.transform_name, f"preserve_identities({self.transform_name})")
        return f"sharedtree.{name}({{}}{options}{{}})"

    def transformed_for(self, policy: Policy, call: Call) -> Any:
        """Returns the transformed function. It differentiates its second argument.

        It is made once for each policy, and kept in `_made`. There are always the same two groups, so it does not
        depend on the labels of this call.
        """
        transformed = self._made.get(policy)
        if transformed is None:
            # The arguments are the two leaf groups. The second one is differentiated.
            options = {**self.options, "argnums": 1}
            # In place, what the function changed in its arguments goes out beside the value, as auxiliary data.
            if policy.in_place:
                options["has_aux"] = True
            # For a transform of Equinox, take the one of JAX that it calls: for `filter_grad`, `jax.grad`. The table
            # has it by the name of Equinox's transform.
            transform = COUNTERPART_OF_FILTER[self.transform.__name__] if self.is_filtered else self.transform
            transformed = self._made.setdefault(policy, transform(self.inner(policy), **options))
        return transformed

    def leave(self, result: Any, call: Call, policy: Policy) -> Any:
        """Builds the result for the user: the gradient in modules, and the value and the auxiliary data if asked for.

        In place, also writes the function's changes into the caller's objects.

        Args:
            result: the result of the transform, with leaf groups.
            call: the call.
            policy: the policy of the call.

        Returns:
            The shape of the vanilla transform's result: `gradient`, `(gradient, aux)`, `(value, gradient)` or
            `((value, aux), gradient)`.
        """
        # The inner function returned a pair of its value and a group of auxiliary data.
        has_aux_group = self._has_aux or policy.in_place
        if self.returns_value:
            value_and_aux, gradient = result
            value, aux = value_and_aux if has_aux_group else (value_and_aux, None)
        else:
            value = None
            gradient, aux = result if has_aux_group else (result, None)
        aux = self._build_aux(aux, call, policy)
        gradient = self.build_gradient(gradient, call)
        if self.returns_value:
            return ((value, aux) if self._has_aux else value), gradient
        return (gradient, aux) if self._has_aux else gradient

    def _build_aux(self, aux: LeafGroup | None, call: Call, policy: Policy) -> Any:
        """Builds the auxiliary data from their group, and returns them. In place, also writes the function's changes.

        Args:
            aux: the group. In place, it holds the changes, too. None without auxiliary data and changes.
            call: the call.
            policy: the policy of the call.
        """
        if aux is None:
            return None
        if not policy.in_place:
            return build_from_groups((aux,))
        # `commit_changes` writes the changes, and returns one tuple for each tree that it got. Here there is one tree.
        # In its tuple the changes come first, and the auxiliary data last (None if the user asked for none).
        (entries,) = commit_changes(call, self.transform_name, (aux,))
        return entries[-1]

    def build_gradient(self, gradient: Any, call: Call) -> Any:
        """Builds a gradient or a Jacobian from leaf groups, with the sharing of the arguments.

        Args:
            gradient: the group with the gradient. For a Jacobian, the group of the function's result, with the group of
                a gradient in place of each leaf. For a Hessian, one level more.
            call: the call.

        Returns:
            The gradient of one argument, or a tuple of gradients if `argnums` is a tuple. For a Jacobian, the
            function's result with a gradient in place of each leaf.
        """

        def build_nested(leaf: Any) -> Any:
            return self.build_gradient(leaf, call) if type(leaf) is LeafGroup else leaf

        # A Jacobian has the shape of the function's result.
        if gradient.selection.structure is not call.tree.structure:
            return build_from_groups((LeafGroup([build_nested(leaf) for leaf in gradient.leaves], gradient.selection),))
        # The arguments again, with gradients for leaves and None for whatever has no gradient.
        arguments = tree_like_arguments((gradient,), list(call.tree.leaves.values()), build_nested)
        num_args = len(arguments.args)
        gradients = tuple([arguments.args[i + num_args if i < 0 else i] for i in self._argnums])
        return gradients[0] if self._has_single_argnum else gradients

    # ---- The function's side ----

    def pack_results(self, result: Any, trace: FunctionTrace) -> Any:
        """Packs the auxiliary data and, in place, the function's changes, into one leaf group beside the value.

        Also warns of lost ties.

        Args:
            result: the result of the user's function: the value or, with `has_aux`, a pair of the value and the
                auxiliary data.
            trace: the trace of the function.

        Returns:
            The result for the transform: the value, or a pair of the value and the group if there are auxiliary data or
            changes. The value of a Jacobian is in a leaf group, too.

        Raises:
            TypeError: if `has_aux` asks for a pair, and the result is none. Raised in place and for a module, where
                JAX's error would print a leaf group. Otherwise JAX raises its own error later.
        """
        policy = trace.terms.policy
        is_pair = isinstance(result, (tuple, list)) and len(result) == 2
        # Refuse a result that is no pair, or leave it to JAX.
        if self._has_aux and not is_pair:
            if policy.in_place or is_module(result):
                raise TypeError(
                    "expected function with aux output to return a two-element tuple, but got type "
                    f"{type(result)} with value {shown(result)}"
                )
            return result
        # Warn of lost ties. In place, `with_arguments` adds the arguments to the result. Nothing else uses this tree.
        tree = trace.flatten(trace.with_arguments(result))
        trace.check_flattened(tree, is_with_arguments=bool(policy.in_place))
        # Make the group of auxiliary data and changes.
        value, aux = result if self._has_aux else (result, None)
        if policy.in_place:
            is_taken = self.make_is_taken(trace.received)
            # Under these rules, a tracer in a static leaf is an error.
            rules = trace.rules_against_leaks(trace.terms.rules)
            aux_group = single_group_of_tree(flatten_with_changes(aux, trace.received.tree, rules, is_taken))
        elif self._has_aux:
            aux_group = trace.pack(aux)
        else:
            aux_group = None
        # The value of a Jacobian may be any tree. The transform differentiates each of its leaves.
        value = trace.pack(value) if self.packs_value else value
        return value if aux_group is None else (value, aux_group)


class ValueAndGradTransform(GradTransform):
    """A function under `jax.value_and_grad`, with identities preserved."""

    returns_value = True


class JacobianTransform(GradTransform):
    """A function under `jax.jacfwd`, `jax.jacrev` or `jax.hessian`, with identities preserved.

    The function's value may be any tree, and the Jacobian has its shape. An object in both the value and the
    auxiliary data comes back as two objects.
    """

    packs_value = True


# ---- Which leaves can be differentiated ----


def _differentiability(leaves: Sequence[Any], *, allow_int: bool) -> tuple[bool, ...] | None:
    """Returns, for each leaf, True if it can be differentiated. This tuple is part of a plan's key.

    A plan says how leaves are grouped. Returns None if a leaf is a `jax.Ref` or a `jax.ShapeDtypeStruct`, so that no
    plan is kept: how these are treated depends on the module around them.
    """
    if any(map(_is_reference_or_struct, leaves)):
        return None
    return tuple([_can_be_differentiated(leaf, allow_int=allow_int) for leaf in leaves])


def _can_be_differentiated(leaf: Any, *, allow_int: bool) -> bool:
    """Returns True if a leaf is inexact. With `allow_int`, also if it is an integer or a boolean.

    Never for PRNG keys and other extended dtypes, nor for an object that is no number or array.
    """
    # A leaf of a plain container may be any object. `is_traced` is True for what JAX itself can trace.
    if not is_traced(leaf, "jax"):
        return False
    if is_inexact(leaf):
        return True
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jax.dtypes.result_type(leaf)
    return allow_int and not jnp.issubdtype(dtype, jax.dtypes.extended)


def undifferentiated_records(tree: FlatDag, rules: Any) -> set[int]:
    """Finds the references and structs to be passed to the function without differentiation, as in Equinox.

    Under an Equinox transform it finds all of them, under a transform of JAX the ones in Equinox modules.

    Args:
        tree: the packed arguments.
        rules: how they were packed.
    """
    records = [record for record, leaf in tree.leaves.items() if _is_reference_or_struct(leaf)]
    # For each record, whose convention decides which leaves are traced: that of the library of the module around it.
    convention_of = conventions(tree, rules) if records else {}
    return {record for record in records if rules.filtered or convention_of.get(record) == "equinox"}


def _is_reference_or_struct(leaf: Any) -> bool:
    return type(leaf) is jax.ShapeDtypeStruct or is_reference(leaf)


def is_reference(leaf: Any) -> bool:
    """Returns True if a leaf is a `jax.Ref`, or a tracer of one."""
    # Nearly all leaves are arrays, for which this test suffices. `isinstance(leaf, jax.Ref)` takes as long as
    # everything else that is done with a leaf.
    if type(leaf) is ConcreteArray:
        return False
    return type(leaf) is jax.Ref or (isinstance(leaf, Tracer) and isinstance(leaf, jax.Ref))


def forbid_references(call: Call, arguments: Sequence[Any], title: str) -> None:
    """Raises an error if a transform of JAX's would differentiate a reference in a module.

    For a reference outside modules, the transform raises its own error later.

    Args:
        call: the call. Its last group is differentiated.
        arguments: the differentiated arguments.
        title: name of the transform. Nothing is raised if it is not in `_TRANSFORMS_REFUSING_REFERENCES`.

    Raises:
        TypeError: with the paths of the references and code to leave them out. JAX's own error is a TypeError, too,
            without paths and code.
    """
    group = call.groups[-1]
    if title not in _TRANSFORMS_REFUSING_REFERENCES or not any(map(is_reference, group.leaves)):
        return
    # Find the paths of the differentiated references in modules.
    outside_modules = call.tree.outside
    records = [call.tree.leaf_numbers[position] for position in group.selection.numbers or ()]
    paths: list[str] = []
    for record, leaf in zip(records, group.leaves, strict=True):
        if is_reference(leaf) and record not in outside_modules:
            paths.append(call.tree.text(record))
    if not paths:
        return
    # Find the classes that the fix excludes. A reference in a variable of NNX is excluded by the class of the variable.
    classes: dict[str, None] = {}

    def collect_class(place: LeafPlace) -> bool:
        if is_reference(place.leaf):
            classes.setdefault("jax.Ref" if place.variable is None else type(place.variable).__name__)
        return True

    # A filter is asked about each leaf. This one only collects classes, and what `selection` returns is not used.
    for argument in arguments:
        selection(argument, Filter(collect_class), "")
    class_or_tuple = f"({', '.join(classes)})" if len(classes) > 1 else ", ".join(classes)
    predicate = "is a `jax.Ref`" if len(paths) == 1 else "are `jax.Ref`s"
    raise TypeError(
        f"{listed(paths)} {predicate}, with respect to which `{title}` cannot differentiate: a reference is a "
        "place, not a value. Leave it out of `wrt` (in Equinox modules it is left out by default):\n"
        f"    sharedtree.{title.removeprefix('jax.')}(f, wrt=lambda path, value: not isinstance(value, "
        f"{class_or_tuple}))"
    )


# ---- One model used twice ----


def modules_used_twice(outcomes: Outcomes) -> set[int]:
    """Finds the modules that may be split: the function then receives two modules, one differentiated and one not.

    They are at the same paths in one differentiated argument and in one other argument. An example is `td(q, q)` right
    after a hard update of the target network: both arguments are one model, and what is meant is clear. A module in a
    third argument, too, or at another path is not among them, and is refused by the caller of this function.

    Args:
        outcomes: the outcomes of all arguments. The outcome of a leaf is True if it is differentiated. An object has a
            conflict if it is reached with two outcomes.

    Returns:
        The records of the modules.
    """
    records = outcomes.tree.records
    # The modules that are in no other module, each with its path and its visit. A visit is a record with the part of
    # the prefix under which it is reached.
    roots = outermost_modules(outcomes)
    conflicts = outcomes.conflicts()
    # For each module with a conflict: the roots that hold it, by position in `roots`, and its outcomes below each.
    holders: defaultdict[int, defaultdict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    for position, (_, root) in enumerate(roots):
        for visit in outcomes.reachable_from(root):
            op = records[visit.record][0]
            if visit.record in conflicts and type(op) is Node and not op.type.is_plain:
                holders[visit.record][position].add(outcomes[visit])
    # For each pair of roots, the modules that only these two hold, with one outcome in each.
    modules_of_pair: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
    for record, outcomes_in in holders.items():
        if len(outcomes_in) == 2 and all(len(numbers) == 1 for numbers in outcomes_in.values()):
            left, right = sorted(outcomes_in)
            modules_of_pair[left, right].add(record)
    # Keep a pair if one root is not differentiated at all, and both are at the same path in their arguments.
    modules: set[int] = set()
    for (left, right), records_of_pair in modules_of_pair.items():
        (left_path, left_root), (right_path, right_root) = roots[left], roots[right]
        is_left_fixed, is_right_fixed = (outcomes.prefix_at(root) is False for root in (left_root, right_root))
        # The first key of a path is the name of the argument, so it must differ.
        is_at_same_path = left_path[0] != right_path[0] and left_path[1:] == right_path[1:]
        if is_left_fixed != is_right_fixed and is_at_same_path:
            modules |= records_of_pair - _records_at_other_paths(outcomes.tree, left_root.record, right_root.record)
    return modules


def _records_at_other_paths(tree: FlatDag, left: int, right: int) -> set[int]:
    """Finds the records that one of two modules has at a path where the other module has another object.

    Args:
        tree: the packed arguments.
        left: record of the first module.
        right: record of the second module.
    """
    # `pairs_of_one_shape` yields pairs of records at one path, and calls `stop` where it cannot go deeper: the classes
    # differ, or both are leaves. If `stop` returns True, the pair is accepted, and `pairs_of_one_shape` goes on with
    # the next pair.
    ends: set[tuple[int, int]] = set()

    def stop(i: int, j: int) -> bool:
        ends.add((i, j))
        return True

    differing: set[int] = set()
    for pair in pairs_of_one_shape(tree.below(left), tree.below(right), stop):
        if pair.left == pair.right:
            continue
        differing.update((pair.left, pair.right))
        # Nothing below these two has a counterpart, so all of it is at other paths.
        if (pair.left, pair.right) in ends:
            differing |= tree.below(pair.left).reached
            differing |= tree.below(pair.right).reached
    return differing
