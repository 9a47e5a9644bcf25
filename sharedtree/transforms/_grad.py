"""`jax.grad`, `jax.value_and_grad`, Jacobians, and their Equinox counterparts.

Of a module in a differentiated argument only the inexact traced leaves are differentiated; all others are in a group of
their own, which goes around. The gradient is a module of the same shape and sharing, with `None` for whatever has no
gradient; a Jacobian is what the function returned, with such a module in place of each leaf.

A `jax.Ref` in what is differentiated is a place and not a value, whose gradient could only be another place. Equinox's
transforms hand it to the function beside what they differentiate, and its gradient is None. So it is here in modules of
Equinox's. JAX refuses it, or fails with an error of its own, when the function reads or writes it.

    Net(w, count=Ref)     grad of Equinox's: Net(g, count=None)       `jax.grad`: an error
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
from ..core._flat_dags import FlatDag
from ..core._jax_internals import ConcreteArray
from ..core._node_types import is_module
from ..core._prefix_trees import Branch
from ..core._printing import listed, shown
from ..core._sharing import matching
from ..core._structure import Node
from ..core._traced_leaves_and_identity import is_traced
from ..optim._wrt import OF_GRAD, require_no_prefix_filter, require_nothing_left, select_everywhere
from ..ties._list_ties import is_inexact
from ..ties._policy_and_context import Policy
from ..tree._asking_filters import selection
from ..tree._filters import Filter, Place, filter_of
from ._adapter_names import UNDER_FILTER
from ._argument_names import several
from ._caller_side import Call, Grouping, leave
from ._function_side import Inside, packed
from ._function_transform import FunctionTransform
from ._grouping_leaves import outermost_modules
from ._in_place import Changes, conventions, with_changes
from ._leaf_groups import LeafGroup, tree_like_arguments
from ._leaf_labels import Outcomes, Treatment
from .checks._partial_gradients import Gradient, report_partial_gradients

_REFUSING = ("jax.grad", "jax.value_and_grad", "jax.jacrev", "jax.hessian")


def is_reference(leaf: Any) -> bool:
    """Whether a leaf is a `jax.Ref`, or stands for one."""
    # Asking `jax.Ref` about something else takes as long as everything else that is done with a leaf.
    if type(leaf) is ConcreteArray:
        return False
    return type(leaf) is jax.Ref or (isinstance(leaf, Tracer) and isinstance(leaf, jax.Ref))


def forbid_references(call: Call, arguments: Sequence[Any], title: str) -> None:
    """Raises if a transform would be given a reference in a module. Of one outside modules it says what is wrong.

    Args:
        call: of which the last group is differentiated.
        arguments: those that are.
        title: of the transform.

    Raises:
        TypeError: as JAX's, with the path and the fix.
    """
    group = call.groups[-1]
    if title not in _REFUSING or not any(map(is_reference, group.leaves)):
        return
    outside = call.tree.outside
    numbers = [call.tree.leaf_numbers[place] for place in group.selection.numbers or ()]
    each = zip(numbers, group.leaves, strict=True)
    texts = [call.tree.text(number) for number, leaf in each if is_reference(leaf) and number not in outside]
    if not texts:
        return
    classes: dict[str, None] = {}

    def ask(place: Place) -> bool:
        if is_reference(place.leaf):
            classes.setdefault("jax.Ref" if place.variable is None else type(place.variable).__name__)
        return True

    for argument in arguments:
        selection(argument, Filter(ask), "")
    several = f"({', '.join(classes)})" if len(classes) > 1 else ", ".join(classes)
    what = "is a `jax.Ref`" if len(texts) == 1 else "are `jax.Ref`s"
    raise TypeError(
        f"`{title}` cannot differentiate with respect to {listed(texts)}, which {what}: a place, not a value. In "
        "modules of Equinox's it is handed to the function beside what is differentiated. In others this has to be "
        "said:\n"
        f"    sharedtree.{title.removeprefix('jax.')}(f, wrt=lambda path, value: not isinstance(value, {several}))"
    )


class GradTransform(FunctionTransform):
    """A function under `jax.grad`, with identities preserved."""

    calls_each_time = True
    own_options = frozenset({"wrt"})
    differentiates = True

    def check_options(self) -> None:
        """As the base."""
        options = self.all_options
        argnums = options.get("argnums", 0)
        require_no_prefix_filter(argnums)
        wrt = options.get("wrt")
        self._selects = None if wrt is None else filter_of(wrt, OF_GRAD)
        self._argnums = tuple(several(argnums))
        self._is_one = not np.ndim(argnums)
        self._has_aux = options.get("has_aux", False)
        self._allow_int = options.get("allow_int", False)
        if "argnums" in options:  # not all versions of JAX take integers of NumPy
            self.options = {**self.options, "argnums": self._argnums[0] if self._is_one else self._argnums}
        super().check_options()

    # Which leaves are differentiated --------------------------------------------------------------------------------

    def chosen(self, num_args: int) -> list[int]:
        """The arguments that are differentiated and there, in order."""
        own = {i + num_args if i < 0 else i for i in self._argnums}
        return sorted([i for i in own if 0 <= i < num_args])

    def grouping(self, policy: Policy, arguments: Arguments) -> Grouping:
        """Which leaves are differentiated; those of a differentiated module that cannot be are not."""
        prefix = self._prefix(arguments)

        def treatments(tree: FlatDag) -> Sequence[Treatment]:
            outside = set[int]()
            if not (self.is_filtered or self._selects is not None):
                roots = [i for i, own in zip(tree.records[tree.root][1], prefix.parts, strict=True) if own]
                outside.update(*[tree.below(root).outside for root in roots])
            beside = handed_beside(tree, self.rules(policy))
            can_be = functools.partial(_can_be_differentiated, allow_int=self._allow_int)

            def resolve(label: Any, leaf: Any, number: int) -> bool:
                return label and number not in beside and (number in outside or can_be(leaf))

            return (
                Treatment(
                    "wrt",
                    prefix,
                    lambda part: isinstance(part, bool),
                    resolve,
                    lambda chosen: "differentiated" if chosen else "not differentiated",
                    groups_by_outcome=True,
                    advice=lambda leaves: self._select_everywhere(arguments, leaves),
                    splittable_modules=used_twice,
                    has_containers=policy.containers,
                ),
            )

        key = "wrt", prefix, self._allow_int, self._selects is not None, self.is_filtered
        asks = functools.partial(_kinds, allow_int=self._allow_int)
        groups = (False,), (True,)
        return Grouping(self.transform_name, treatments, key, asks, groups, is_of_form=self._selects is None)

    def _prefix(self, arguments: Arguments) -> Branch:
        chosen = self.chosen(len(arguments.args))
        positions = positions_of(arguments.parts()[1])
        if self._selects is None:
            return Branch(tuple([position in chosen for position in positions]))
        own = {i: selection(arguments.args[i], self._selects, self.names.text(i)) for i in chosen}
        return Branch(tuple([own.get(i, False) if isinstance(i, int) else False for i in positions]))

    def _select_everywhere(self, arguments: Arguments, leaves: Sequence[Any]) -> str:
        """The fix where `wrt` selects leaves at some of their paths only."""
        if self._selects is None:
            return ""
        return select_everywhere(self._differentiated(arguments), self._selects, leaves)

    def _differentiated(self, arguments: Arguments) -> list[Any]:
        return [arguments.args[i] for i in self.chosen(len(arguments.args))]

    # The caller's side ----------------------------------------------------------------------------------------------

    def enter(self, args: Sequence[Any], kwargs: dict[str, Any], policy: Policy) -> Call:
        """As the base; says what the gradient will lack."""
        if len(self.chosen(len(args))) < len(set(self._argnums)):
            self.transform(self.function, **self.options)(*args, **kwargs)  # says best what is wrong
        call = super().enter(args, kwargs, policy)
        chosen = self.chosen(len(args))
        if call.plan.cuts:
            again = Gradient(
                chosen, self._called(), self._written(policy), lambda x: self._select_everywhere(call.arguments, x)
            )
            report_partial_gradients(call, again, self.names, policy)
        forbid_references(call, self._differentiated(call.arguments), self.transform_name)
        if self._selects is not None and not call.groups[1].leaves:
            given = self._differentiated(call.arguments)
            can_be = functools.partial(_can_be_differentiated, allow_int=self._allow_int)
            require_nothing_left(given, can_be, self.all_options["wrt"])
        return call

    def _called(self) -> str:
        name = getattr(self.function, "__name__", "")
        return name if name.isidentifier() else "f"

    def _written(self, policy: Policy) -> str:
        """How to write this transform of another function, with more options."""
        own = "".join(f", {name}={value!r}" for name, value in self.options.items() if name != "argnums")
        own += ", wrt=wrt" if self._selects is not None else ""
        own += ", policy=sharedtree.Policy(containers=True)" if policy.containers else ""
        known = {"jax.grad": "grad", "equinox.filter_grad": "grad"}
        known |= {"jax.value_and_grad": "value_and_grad", "equinox.filter_value_and_grad": "value_and_grad"}
        name = known.get(self.transform_name, f"preserve_identities({self.transform_name})")
        return f"sharedtree.{name}({{}}{own}{{}})"

    def transformed_for(self, policy: Policy, call: Call) -> Any:
        """The second group is differentiated; in place, what was changed comes as auxiliary data."""
        made = self._made.get(policy)
        if made is None:
            options = {**self.options, "argnums": 1}
            if policy.in_place:
                options["has_aux"] = True
            transform = UNDER_FILTER[self.transform.__name__] if self.is_filtered else self.transform
            made = self._made.setdefault(policy, transform(self.inner(policy), **options))
        return made

    def leave(self, result: Any, call: Call, policy: Policy, used: Any = None) -> Any:
        """Coming out: gradients as modules, and the auxiliary data."""
        gradient, aux = result if self._has_aux or policy.in_place else (result, None)
        aux = self.leave_aux(aux, call, policy)
        gradient = self.like(gradient, call)
        return (gradient, aux) if self._has_aux else gradient

    def leave_aux(self, aux: Any, call: Call, policy: Policy) -> Any:
        """The auxiliary data; in place, what was changed came with them, and is written."""
        if aux is None:
            return None
        if not policy.in_place:
            return leave((aux,))
        changes = Changes(call, self.transform_name)
        made = leave((aux,), call.objects.__getitem__, changes.update)
        changes.commit()
        return made[-1]

    def like(self, gradient: Any, call: Call) -> Any:
        """The gradient, with the sharing of the arguments, and None where nothing is differentiable."""

        def nested(leaf: Any) -> Any:
            return self.like(leaf, call) if type(leaf) is LeafGroup else leaf

        if gradient.selection.structure is not call.tree.structure:  # the function's result, in a Jacobian
            return leave((LeafGroup([nested(leaf) for leaf in gradient.leaves], gradient.selection),))
        made = tree_like_arguments((gradient,), list(call.tree.leaves.values()), nested)
        num_args = len(made.args)
        each = tuple([made.args[i + num_args if i < 0 else i] for i in self._argnums])
        return each[0] if self._is_one else each

    # The function's side --------------------------------------------------------------------------------------------

    def pack_results(self, result: Any, inside: Inside) -> Any:
        """The value as it is, and what is beside it as a group.

        Raises:
            TypeError: as of JAX, which would see something else, if the result is no pair and should be one.
        """
        policy = inside.terms.policy
        is_pair = isinstance(result, (tuple, list)) and len(result) == 2
        if self._has_aux and not is_pair:
            if policy.in_place or is_module(result):
                raise TypeError(
                    "expected function with aux output to return a two-element tuple, but got type "
                    f"{type(result)} with value {shown(result)}"
                )
            return result
        tree = inside.walked(inside.with_state(result))
        inside.check_walked(tree, is_with_state=bool(policy.in_place))
        value, aux = result if self._has_aux else (result, None)
        if policy.in_place:
            taken = self.is_taken(inside.received)
            beside = packed(with_changes(aux, inside.received.tree, inside.forbidding(inside.terms.rules), taken))
        elif self._has_aux:
            beside = inside.pack(aux)
        else:
            return self.value(value, inside)
        return self.value(value, inside), beside

    def value(self, value: Any, inside: Inside) -> Any:
        """What is differentiated, as the transform gets it."""
        return value


def _kinds(leaves: Sequence[Any], *, allow_int: bool) -> tuple[bool, ...] | None:
    """Which can be differentiated; nothing is remembered of references and structs, looked at in each call."""
    return (
        None
        if any(map(_may_go_beside, leaves))
        else tuple([_can_be_differentiated(x, allow_int=allow_int) for x in leaves])
    )


def _may_go_beside(leaf: Any) -> bool:
    return type(leaf) is jax.ShapeDtypeStruct or is_reference(leaf)


def _can_be_differentiated(leaf: Any, *, allow_int: bool) -> bool:
    if not is_traced(leaf, "jax"):  # in a container; the transform refuses it
        return False
    if is_inexact(leaf):
        return True
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jax.dtypes.result_type(leaf)
    return allow_int and not jnp.issubdtype(dtype, jax.dtypes.extended)


class ValueAndGradTransform(GradTransform):
    """A function under `jax.value_and_grad`, with identities preserved."""

    def leave(self, result: Any, call: Call, policy: Policy, used: Any = None) -> Any:
        """Coming out: the value and what is beside it, and gradients as modules."""
        value, gradient = result
        value, aux = value if self._has_aux or policy.in_place else (value, None)
        aux = self.leave_aux(aux, call, policy)
        return ((value, aux) if self._has_aux else value), self.like(gradient, call)


class JacobianTransform(GradTransform):
    """A function under `jax.jacfwd`, `jax.jacrev` or `jax.hessian`, with identities preserved.

    The value comes back differentiated, and what is beside it as it is. So what is in both is parted.
    """

    def value(self, value: Any, inside: Inside) -> Any:
        """As a group, for it may be any tree."""
        return inside.pack(value)


def handed_beside(tree: FlatDag, rules: Any) -> set[int]:
    """The references and structs of shapes that Equinox hands to the function beside what it differentiates."""
    found = [number for number, leaf in tree.leaves.items() if _may_go_beside(leaf)]
    around = conventions(tree, rules) if found else {}
    return {number for number in found if rules.filtered or around.get(number) == "equinox"}


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
    """Finds the records below either of two modules that are not below the other one at the same path."""
    # Pairs at which `matching` stops: the classes differ, or both are leaves.
    ends: set[tuple[int, int]] = set()

    def stop(i: int, j: int) -> bool:
        ends.add((i, j))
        return True

    differing: set[int] = set()
    for pair in matching(tree.below(left), tree.below(right), stop):
        if pair.left == pair.right:
            continue
        differing.update((pair.left, pair.right))
        if (pair.left, pair.right) in ends:
            differing |= tree.below(pair.left).reached
            differing |= tree.below(pair.right).reached
    return differing
