"""`jax.grad`, `jax.value_and_grad`, Jacobians, and their Equinox counterparts.

In a differentiated module, only the inexact traced leaves are differentiated. All others are in a leaf group of their
own, which goes around the transform. The gradient is a module of the same shape and sharing, with `None` for leaves
without a gradient. A Jacobian is the function's result, with such a module in place of each leaf.

    f(Net(w, [w, 3]), x)     groups [x] and [w]      gradient [g]      Net(g, [g, None])

A `jax.Ref` is a place and not a value, so it has no gradient. Equinox's transforms pass references to the function
around the differentiation, and their gradient is None. We do the same, and also under JAX's transforms for references
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
from ..tree._filters import Filter, Place, filter_of
from ._adapter_names import UNDER_FILTER
from ._argument_names import as_sequence
from ._caller_side import Call, Grouping, leave
from ._function_side import FunctionTrace, packed
from ._function_transform import FunctionTransform
from ._grouping_leaves import outermost_modules
from ._in_place import commit_changes, conventions, with_changes
from ._leaf_groups import LeafGroup, tree_like_arguments
from ._leaf_labels import Outcomes, Treatment
from .checks._partial_gradients import Gradient, report_partial_gradients

_TRANSFORMS_REFUSING_REFERENCES = ("jax.grad", "jax.value_and_grad", "jax.jacrev", "jax.hessian")

_NAMES_IN_SHAREDTREE = {
    "jax.grad": "grad",
    "equinox.filter_grad": "grad",
    "jax.value_and_grad": "value_and_grad",
    "equinox.filter_value_and_grad": "value_and_grad",
}
"""Names of transforms under which sharedtree offers them with identities preserved."""


class GradTransform(FunctionTransform):
    """A function under `jax.grad`, with identities preserved."""

    calls_each_time = True
    package_options = frozenset({"wrt"})
    differentiates = True
    packs_value = False
    """True if the transform gets the function's value as a leaf group."""
    returns_value = False
    """True if the transform returns the value beside the gradient."""

    def check_options(self) -> None:
        """Reads the options, and lets the transform refuse wrong ones."""
        options = self.all_options
        argnums = options.get("argnums", 0)
        require_no_prefix_filter(argnums)
        wrt = options.get("wrt")
        self._filter = None if wrt is None else filter_of(wrt, OF_GRAD)
        self._argnums = tuple(as_sequence(argnums))
        self._has_single_argnum = not np.ndim(argnums)
        self._has_aux = options.get("has_aux", False)
        self._allow_int = options.get("allow_int", False)
        # Not all releases of JAX take NumPy's integers.
        if "argnums" in options:
            self.options = {**self.options, "argnums": self._argnums[0] if self._has_single_argnum else self._argnums}
        super().check_options()

    # ---- Which leaves are differentiated ----

    def differentiated_positions(self, num_args: int) -> list[int]:
        """Positions of the differentiated arguments, in order. Arguments missing in the call are left out."""
        positions = {i + num_args if i < 0 else i for i in self._argnums}
        return sorted([i for i in positions if 0 <= i < num_args])

    def grouping(self, policy: Policy, arguments: Arguments) -> Grouping:
        """Groups leaves by whether they are differentiated."""
        prefix = self._prefix(arguments)

        def treatments(tree: FlatDag) -> Sequence[Treatment]:
            """Makes the treatment of arguments."""
            # Leaves outside modules are left to JAX, which refuses integers. Equinox and `wrt` skip them.
            outside = set[int]()
            if not (self.is_filtered or self._filter is not None):
                children = tree.records[tree.root][1]
                roots = [child for child, part in zip(children, prefix.parts, strict=True) if part]
                outside.update(*[tree.below(root).outside for root in roots])
            undifferentiated = undifferentiated_records(tree, self.rules(policy))
            can_differentiate = functools.partial(_can_be_differentiated, allow_int=self._allow_int)

            def resolve(label: Any, leaf: Any, record: int) -> bool:
                return label and record not in undifferentiated and (record in outside or can_differentiate(leaf))

            return (
                Treatment(
                    "wrt",
                    prefix,
                    lambda part: isinstance(part, bool),
                    resolve,
                    lambda is_differentiated: "differentiated" if is_differentiated else "not differentiated",
                    groups_by_outcome=True,
                    advice=lambda leaves: self._advice(arguments, leaves),
                    splittable_modules=used_twice,
                    has_containers=policy.containers,
                ),
            )

        key = "wrt", prefix, self._allow_int, self._filter is not None, self.is_filtered
        asks = functools.partial(_differentiability, allow_int=self._allow_int)
        groups = (False,), (True,)
        return Grouping(self.transform_name, treatments, key, asks, groups, holds_for_like_calls=self._filter is None)

    def _prefix(self, arguments: Arguments) -> Branch:
        """Makes the prefix of all arguments: True if selected by `argnums` and `wrt`, else False."""
        differentiated = self.differentiated_positions(len(arguments.args))
        positions = positions_of(arguments.parts()[1])
        if self._filter is None:
            return Branch(tuple([position in differentiated for position in positions]))
        selections = {i: selection(arguments.args[i], self._filter, self.names.text(i)) for i in differentiated}
        return Branch(tuple([selections.get(i, False) if isinstance(i, int) else False for i in positions]))

    def _advice(self, arguments: Arguments, leaves: Sequence[Any]) -> str:
        """Advice in an error about leaves selected by `wrt` at some of their paths only. Empty without `wrt`."""
        if self._filter is None:
            return ""
        return select_everywhere(self._differentiated_arguments(arguments), self._filter, leaves)

    def _differentiated_arguments(self, arguments: Arguments) -> list[Any]:
        return [arguments.args[i] for i in self.differentiated_positions(len(arguments.args))]

    # ---- The caller's side ----

    def enter(self, args: Sequence[Any], kwargs: dict[str, Any], policy: Policy) -> Call:
        """Enters a call. Warns if the gradient will lack a part, and refuses a selection without any leaf."""
        # If an argument of `argnums` is missing, the transform raises its own error.
        if len(self.differentiated_positions(len(args))) < len(set(self._argnums)):
            self.raise_vanilla_error(args, kwargs)
        call = super().enter(args, kwargs, policy)
        positions = self.differentiated_positions(len(args))
        if call.plan.cuts:
            gradient = Gradient(
                positions,
                self._function_as_code(),
                self._transform_as_code(policy),
                lambda leaves: self._advice(call.arguments, leaves),
            )
            report_partial_gradients(call, gradient, self.names, policy)
        forbid_references(call, self._differentiated_arguments(call.arguments), self.transform_name)
        if self._filter is not None and not call.groups[1].leaves:
            differentiated = self._differentiated_arguments(call.arguments)
            can_differentiate = functools.partial(_can_be_differentiated, allow_int=self._allow_int)
            require_nothing_left(differentiated, can_differentiate, self.all_options["wrt"])
        return call

    def _function_as_code(self) -> str:
        name = getattr(self.function, "__name__", "")
        return name if name.isidentifier() else "f"

    def _transform_as_code(self, policy: Policy) -> str:
        """Writes the code of this transform, with `{}` for the function and for more options."""
        options = "".join(f", {name}={value!r}" for name, value in self.options.items() if name != "argnums")
        options += ", wrt=wrt" if self._filter is not None else ""
        options += ", policy=sharedtree.Policy(containers=True)" if policy.containers else ""
        name = _NAMES_IN_SHAREDTREE.get(self.transform_name, f"preserve_identities({self.transform_name})")
        return f"sharedtree.{name}({{}}{options}{{}})"

    def transformed_for(self, policy: Policy, call: Call) -> Any:
        """Makes the transformed function, once for each policy. It differentiates the second group."""
        transformed = self._made.get(policy)
        if transformed is None:
            options = {**self.options, "argnums": 1}
            # In place, changes go out beside the value, as auxiliary data.
            if policy.in_place:
                options["has_aux"] = True
            transform = UNDER_FILTER[self.transform.__name__] if self.is_filtered else self.transform
            transformed = self._made.setdefault(policy, transform(self.inner(policy), **options))
        return transformed

    def leave(self, result: Any, call: Call, policy: Policy, used: Any = None) -> Any:
        """Builds the gradient as modules, the auxiliary data, and the value if the transform returns it."""
        has_aux_group = self._has_aux or policy.in_place
        if self.returns_value:
            first, gradient = result
            value, aux = first if has_aux_group else (first, None)
        else:
            value = None
            gradient, aux = result if has_aux_group else (result, None)
        aux = self.leave_aux(aux, call, policy)
        gradient = self.build_gradient(gradient, call)
        if self.returns_value:
            return ((value, aux) if self._has_aux else value), gradient
        return (gradient, aux) if self._has_aux else gradient

    def leave_aux(self, aux: Any, call: Call, policy: Policy) -> Any:
        """Builds the auxiliary data. In place, writes the changes beside them."""
        if aux is None:
            return None
        if not policy.in_place:
            return leave((aux,))
        # The changes come first, the auxiliary data last.
        (entries,) = commit_changes(call, self.transform_name, (aux,))
        return entries[-1]

    def build_gradient(self, gradient: Any, call: Call) -> Any:
        """Builds a gradient or a Jacobian, with the sharing of the arguments.

        Args:
            gradient: the group with the gradient. For a Jacobian, the group of the function's result, with the group of
                a gradient in place of each leaf. For a Hessian, one level more.
            call: the call.
        """

        def build_nested(leaf: Any) -> Any:
            return self.build_gradient(leaf, call) if type(leaf) is LeafGroup else leaf

        # A Jacobian has the shape of the function's result.
        if gradient.selection.structure is not call.tree.structure:
            return leave((LeafGroup([build_nested(leaf) for leaf in gradient.leaves], gradient.selection),))
        arguments = tree_like_arguments((gradient,), list(call.tree.leaves.values()), build_nested)
        num_args = len(arguments.args)
        gradients = tuple([arguments.args[i + num_args if i < 0 else i] for i in self._argnums])
        return gradients[0] if self._has_single_argnum else gradients

    # ---- The function's side ----

    def pack_results(self, result: Any, trace: FunctionTrace) -> Any:
        """Packs auxiliary data and changes into one group beside the value.

        Returns:
            The value as the transform gets it, or a pair of this value and the group if there is a group.

        Raises:
            TypeError: if the result should be a pair and is none, under `in_place` or if it is a module. JAX would
                raise an error that names a leaf group. For any other result JAX's own error follows.
        """
        policy = trace.terms.policy
        is_pair = isinstance(result, (tuple, list)) and len(result) == 2
        if self._has_aux and not is_pair:
            if policy.in_place or is_module(result):
                raise TypeError(
                    "expected function with aux output to return a two-element tuple, but got type "
                    f"{type(result)} with value {shown(result)}"
                )
            return result
        # This tree is only for the check of lost ties. What is packed follows.
        tree = trace.walked(trace.with_state(result))
        trace.check_walked(tree, is_with_state=bool(policy.in_place))
        value, aux = result if self._has_aux else (result, None)
        if policy.in_place:
            is_taken = self.is_taken(trace.received)
            rules = trace.forbidding_leaks(trace.terms.rules)
            aux_group = packed(with_changes(aux, trace.received.tree, rules, is_taken))
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

    Its value may be any tree, and comes back as a Jacobian. An object in both the value and the auxiliary data comes
    back as two objects.
    """

    packs_value = True


# ---- Which leaves can be differentiated ----


def _differentiability(leaves: Sequence[Any], *, allow_int: bool) -> tuple[bool, ...] | None:
    """For each leaf, True if it can be differentiated. None if a leaf is a reference or a struct.

    Their treatment depends on the module around them, so no plan is kept for the call.
    """
    if any(map(_is_reference_or_struct, leaves)):
        return None
    return tuple([_can_be_differentiated(leaf, allow_int=allow_int) for leaf in leaves])


def _can_be_differentiated(leaf: Any, *, allow_int: bool) -> bool:
    # A leaf of a container may be anything. The transform refuses it.
    if not is_traced(leaf, "jax"):
        return False
    if is_inexact(leaf):
        return True
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jax.dtypes.result_type(leaf)
    return allow_int and not jnp.issubdtype(dtype, jax.dtypes.extended)


def undifferentiated_records(tree: FlatDag, rules: Any) -> set[int]:
    """Finds the references and structs to be passed to the function around the transform, as in Equinox."""
    records = [record for record, leaf in tree.leaves.items() if _is_reference_or_struct(leaf)]
    convention_of = conventions(tree, rules) if records else {}
    return {record for record in records if rules.filtered or convention_of.get(record) == "equinox"}


def _is_reference_or_struct(leaf: Any) -> bool:
    return type(leaf) is jax.ShapeDtypeStruct or is_reference(leaf)


def is_reference(leaf: Any) -> bool:
    """Returns True if a leaf is a `jax.Ref`, or a tracer of one."""
    # `isinstance(leaf, jax.Ref)` takes as long as everything else that is done with a leaf.
    if type(leaf) is ConcreteArray:
        return False
    return type(leaf) is jax.Ref or (isinstance(leaf, Tracer) and isinstance(leaf, jax.Ref))


def forbid_references(call: Call, arguments: Sequence[Any], title: str) -> None:
    """Raises an error if a transform of JAX's would differentiate a reference in a module.

    For a reference outside modules, the transform raises its own error later.

    Args:
        call: the call. Its last group is differentiated.
        arguments: the differentiated arguments.
        title: name of the transform.

    Raises:
        TypeError: if there is such a reference. JAX raises the same class, without path and fix.
    """
    group = call.groups[-1]
    if title not in _TRANSFORMS_REFUSING_REFERENCES or not any(map(is_reference, group.leaves)):
        return
    outside = call.tree.outside
    records = [call.tree.leaf_numbers[position] for position in group.selection.numbers or ()]
    texts: list[str] = []
    for record, leaf in zip(records, group.leaves, strict=True):
        if is_reference(leaf) and record not in outside:
            texts.append(call.tree.text(record))
    if not texts:
        return
    # Classes for the fix: a reference in a variable of NNX is selected by the class of the variable.
    classes: dict[str, None] = {}

    def collect_class(place: Place) -> bool:
        if is_reference(place.leaf):
            classes.setdefault("jax.Ref" if place.variable is None else type(place.variable).__name__)
        return True

    for argument in arguments:
        selection(argument, Filter(collect_class), "")
    class_or_tuple = f"({', '.join(classes)})" if len(classes) > 1 else ", ".join(classes)
    predicate = "is a `jax.Ref`" if len(texts) == 1 else "are `jax.Ref`s"
    raise TypeError(
        f"`{title}` cannot differentiate with respect to {listed(texts)}, which {predicate}: a place, not a value. In "
        "modules of Equinox's it is handed to the function beside what is differentiated. In others this has to be "
        "said:\n"
        f"    sharedtree.{title.removeprefix('jax.')}"
        f"(f, wrt=lambda path, value: not isinstance(value, {class_or_tuple}))"
    )


# ---- One model used twice ----


def used_twice(outcomes: Outcomes) -> set[int]:
    """Finds the modules that one differentiated argument and one other argument hold at the same paths.

    `td(q, q)` right after a hard update of the target network: both arguments are one model, and it is clear what is
    meant. Such modules are split, as arrays are. A module that a third argument holds too, or that is at another path,
    is not among the result, so that it is refused.
    """
    records = outcomes.tree.records
    roots = outermost_modules(outcomes)
    conflicts = outcomes.conflicts()
    # For each module with a conflict: the arguments that hold it, by position in `roots`, and its outcomes in each.
    holders: defaultdict[int, defaultdict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    for position, (_, root) in enumerate(roots):
        for visit in outcomes.reachable_from(root):
            op = records[visit.record][0]
            if visit.record in conflicts and type(op) is Node and not op.type.is_plain:
                holders[visit.record][position].add(outcomes[visit])
    # Modules that exactly two arguments hold, with one outcome in each.
    modules_of_pair: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
    for record, outcomes_in in holders.items():
        if len(outcomes_in) == 2 and all(len(numbers) == 1 for numbers in outcomes_in.values()):
            left, right = sorted(outcomes_in)
            modules_of_pair[left, right].add(record)
    modules: set[int] = set()
    for (left, right), records_of_pair in modules_of_pair.items():
        (left_path, left_root), (right_path, right_root) = roots[left], roots[right]
        is_left_fixed, is_right_fixed = (outcomes.prefix_at(root) is False for root in (left_root, right_root))
        is_at_same_path = left_path[0] != right_path[0] and left_path[1:] == right_path[1:]
        if is_left_fixed != is_right_fixed and is_at_same_path:
            modules |= records_of_pair - _at_other_paths(outcomes.tree, left_root.record, right_root.record)
    return modules


def _at_other_paths(tree: FlatDag, left: int, right: int) -> set[int]:
    """Finds the records below two modules, without those that both modules hold at the same path."""
    # `pairs_of_one_shape` yields pairs of records at one path, and calls `stop` where it cannot go deeper: the classes
    # differ, or both are leaves. True lets it go on beside the pair.
    ends: set[tuple[int, int]] = set()

    def stop(i: int, j: int) -> bool:
        ends.add((i, j))
        return True

    differing: set[int] = set()
    for pair in pairs_of_one_shape(tree.below(left), tree.below(right), stop):
        if pair.left == pair.right:
            continue
        differing.update((pair.left, pair.right))
        if (pair.left, pair.right) in ends:
            differing |= tree.below(pair.left).reached
            differing |= tree.below(pair.right).reached
    return differing
