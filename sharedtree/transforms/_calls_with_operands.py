"""One call of a transform that takes operands, and the four steps of its adapter.

The *operands* are the transform's arguments beside the function, such as `init` and `xs` of `jax.lax.scan`.

- *enter*: packs the operands as one graph, and groups their leaves by label.
- *function*: makes the *inner function*, which the transform gets in place of the user's function.
- *apply*: calls the transform.
- *leave*: builds the user's result from what the transform returns.

The transform gets *leaf groups* instead of the operands: their traced leaves, each once, as pytree nodes. A label is
what the transform does with a leaf. A *body* says what the inner function does in one trace: it calls the user's
function, and packs the result. *In place* means that what the function changes in the operands is written back into the
caller's objects.

    def one_element(trace, x):                           # the body
        return trace.pack(trace.call(x))

    def map_over(call, f, xs):                           # the adapter of a transform `map_over(f, xs)`
        (xs,) = call.enter(f, {"xs": xs})
        inner = call.function(f, one_element)
        return call.leave(call.apply(inner, xs))
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from ..core._call_arguments import Arguments
from ..core._jax_internals import api_boundary
from ..core._node_types import node_type_of
from ..core._prefix_trees import Branch
from ..core._structure import Structure, canonical_records, intern
from ..ties._policy_and_context import PolicyOption, current_policy, with_options
from ._argument_names import Names
from ._caller_side import Call, Grouping, build_from_groups, pack_call, repack_call
from ._function_and_options import is_of_equinox
from ._function_given_to_jax import Inner, Learned, shared_by
from ._function_side import Terms
from ._function_transform import rules_of_call
from ._in_place import commit_changes
from ._joining_trees import Repacking
from ._leaf_groups import LeafGroup, single_group
from ._leaf_labels import Treatment
from ._option_lists import title_of
from .checks._lost_changes import DeferredLosses
from .checks._refused_arguments import forbid_bound_module, forbid_in_place


class CallWithOperands:
    """One call of a transform with operands, for its adapter.

    Args:
        transform: the vanilla transform.
        title: name of the transform in errors.
        policy: what carries identity. None for the policy of the thread.
        writes: True if the transform can write back changes of the operands.
        calls_each_time: True if each call of the transform calls the function. Then the function gets the static
            objects of this very call, and not equal ones of an earlier call.

    Attributes:
        names: names of the operands. Set by `enter`.
        packed: the packed and grouped operands. Set by `enter`.
    """

    def __init__(
        self,
        transform: Callable[..., Any],
        title: str,
        policy: PolicyOption,
        *,
        writes: bool = True,
        calls_each_time: bool = False,
    ) -> None:
        """Fixes the policy for the whole call: the one that is in force now."""
        self.transform = transform
        self.title = title
        self.policy = current_policy(policy)
        self.writes = writes
        self.rules = rules_of_call(self.policy, filtered=is_of_equinox(transform), is_exact=calls_each_time)
        # Set by `enter_grouped`.
        self.names: Names
        self.packed: Call
        # For each inner function, changes lost in its traces that did not run. `apply` warns of them.
        self._deferred_losses: list[DeferredLosses] = []

    def enter(
        self,
        function: Callable[..., Any],
        operands: Mapping[str, Any],
        treatments: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """Packs the operands, in their order, as one graph, and groups their leaves by treatment.

        Args:
            function: the user's function. Warnings point to its definition.
            operands: the operands by their names in errors.
            treatments: name of each operand → what the transform does with it, in words, such as "carried" for `init`
                and "scanned" for `xs`. None if all operands are treated alike.

        Returns:
            One argument of the transform for each treatment, in the order of the operands. It is a leaf group, or a
            bare array: some transforms read an array, as in `ts[1:]`. So an operand that is itself an array is returned
            as it is, if no other operand has its treatment. The first operand is always in a group.

        Raises:
            InconsistentSharingError: if a module that holds traced leaves would be treated in two ways.
            CycleError: if an object contains itself.
        """
        names = tuple(operands)
        # The treatment in words is the label of each leaf of an operand.
        labels = () if treatments is None else tuple([treatments[name] for name in names])
        # The prefix is a tree of labels: here one label for each operand.
        treatment = Treatment("operands", prefix=Branch(labels), is_label=lambda label: isinstance(label, str))
        arguments = Arguments(names, tuple(operands.values()), {})
        # A grouping without treatments makes one group of all leaves.
        if not labels:
            return list(self.enter_grouped(function, arguments, Grouping(self.title, lambda _: ())))
        # A group has one label for each treatment of the grouping, which has one.
        group_labels = [(label,) for label in dict.fromkeys(labels)]
        grouping = Grouping(self.title, lambda _: (treatment,), key=labels, groups=group_labels)
        groups = self.enter_grouped(function, arguments, grouping)
        # Labels of the operands that are leaves. Not of the first one: it stays in a group, since the inner function
        # needs a group to build the arguments from.
        labels_of_leaves = {
            labels[i] for i, operand in enumerate(arguments.args) if i and node_type_of(operand) is None
        }
        # For each group, True if its only leaf is returned in its place.
        bare = [labels.count(label) == 1 and label in labels_of_leaves for (label,) in group_labels]
        return [group.leaves[0] if is_bare else group for group, is_bare in zip(groups, bare, strict=True)]

    def enter_grouped(
        self, function: Callable[..., Any], arguments: Arguments, grouping: Grouping
    ) -> Sequence[LeafGroup]:
        """Packs arguments, and groups their leaves as a grouping says. Returns the groups, and sets `packed`.

        For adapters to which `enter` gives too little choice.

        Args:
            function: the user's function. Warnings point to its definition.
            arguments: the operands, with their names.
            grouping: what the transform does with them.

        Raises:
            InconsistentSharingError: if a module that holds traced leaves would be treated in two ways.
            CycleError: if an object contains itself.
            SharingMismatchError: if an option does not fit the operands.
        """
        self.names = Names(function, [str(name) for name in arguments.names])
        self.packed = pack_call(arguments, self.rules, grouping)
        return self.packed.groups

    def function(
        self,
        function: Callable[..., Any],
        body: Callable[..., Any],
        *key: Hashable,
        caches_traces: bool = True,
        num_before: int = 0,
        differentiates: bool = False,
        adds: bool = True,
        keeps: bool = True,
    ) -> Inner:
        """Returns the inner function, which the transform calls in place of the user's. Call `enter` before.

        The inner function is kept with the user's function, and made once for each body, key and policy. So JAX finds
        its traces again.

        Args:
            function: the user's function. If it is not callable, the transform's own error is raised in the end.
            body: (a `FunctionTrace`, the arguments from the transform) → result for the transform. Define it at the top
                level of a module: traces are found again by its identity.
            key: everything else on which the body depends.
            caches_traces: True if a trace serves many calls, so that a retrace is worth a warning.
            num_before: number of arguments that the transform passes before the operands, such as an index.
            differentiates: True if the transform differentiates the leaves with the label True.
            adds: in place, True if a changed object may have more children than before, or fewer.
            keeps: in place, True if changes that this function makes reach the caller. Those of a loop's condition do
                not.

        Raises:
            TypeError: in place, if the function is a mutable module or a method of one.
        """
        if not callable(function):
            # `TakingOperands` catches this, and calls the transform as it is.
            raise NoFunctionError
        # This outlives the call: the inner functions of the user's function, and findings from their traces.
        shared = shared_by(function, (self.transform, body, *key), {"names": self.names.positional})
        self._deferred_losses.append(shared.history.deferred_losses)

        def make() -> Inner:
            """Makes the inner function, or raises the `TypeError`."""
            forbid_bound_module(function, self.policy, self.title)
            terms = Terms(
                self.title,
                Names(function, self.names.positional),
                self.policy,
                self.rules,
                shared.history,
                caches_traces,
                self.writes,
                learned=Learned(),
                differentiates=differentiates,
                adds=adds,
                keeps=keeps,
            )
            # JAX's messages name the arguments as the user's function does, and not as the transform names its
            # operands.
            names_in_function = Names(function).of(num_before + len(self.names.positional))
            return Inner(function, terms, body, shared.get_function, names_in_function, num_before)

        return shared.inner_for(self.policy, make)

    def apply(self, *args: Any, **options: Any) -> Any:
        """Calls the transform with leaf groups, and returns its result.

        During the call, a trace of the function finds the caller's side. Afterwards the leaf groups do not refer to it.
        """
        return self.apply_other(self.transform, *args, **options)

    def apply_other(self, transform: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Does what `apply` does, with another transform in place of the vanilla one."""
        structure = self.packed.tree.structure
        # As a context manager, the call ends with the block: the leaf groups then refer to it no more.
        with self.packed:
            result = transform(*args, **options)
        # An earlier trace may not have run its program. If this call ran it, warn of the changes that it loses.
        for deferred_losses in self._deferred_losses:
            deferred_losses.report(structure)
        return result

    def leave(self, *results: LeafGroup, with_changes: Sequence[int] = ()) -> Any:
        """Builds the results of the function. In place, writes its changes into the caller's objects, all or nothing.

        Args:
            results: leaf groups. Each has all leaves of a tree, or those of one operand (as from `FunctionTrace.like`).
            with_changes: positions of those results that `FunctionTrace.pack_with_changes` has packed.

        Returns:
            The result, or a tuple of the results if there are several.

        Raises:
            InconsistentSharingError: in place, if a changed object cannot be written back.
        """
        structure_of_operands = self.packed.plan.structure
        # A group of one operand still has the structure of all operands.
        groups = [_of_one_operand(group) if group.structure is structure_of_operands else group for group in results]
        if not self.policy.in_place:
            trees = [build_from_groups((group,)) for group in groups]
        else:
            trees = commit_changes(self.packed, self.title, *[(group,) for group in groups])
            # With changes, a tree is a tuple: the changed objects, and last the result.
            trees = [tree[-1] if i in with_changes else tree for i, tree in enumerate(trees)]
        return trees[0] if len(trees) == 1 else tuple(trees)

    def repack(self, repacking: Repacking) -> None:
        """Packs and groups the operands again. The repacking says which ties are cut and which numbers are traced."""
        self.packed = repack_call(self.packed, repacking)


def _of_one_operand(group: LeafGroup) -> LeafGroup:
    """Returns a group with the same leaves and the structure of their operand alone."""
    return single_group(group.leaves, structure_of_argument(group.structure, group.operand).structure)


class ArgumentStructure(NamedTuple):
    """Structure of one argument by itself.

    Attributes:
        structure: the structure.
        origins: for each of its records, the record of the same object in the structure of all arguments.
    """

    structure: Structure
    origins: list[int]


def structure_of_argument(structure: Structure, position: int) -> ArgumentStructure:
    """Makes the structure of one argument by itself.

    Args:
        structure: structure of all arguments.
        position: position of the argument.
    """
    root = structure.records[structure.root][1][position]
    # Numbers the records below the argument anew, in the order of a walk. The root is the last.
    records, numbers = canonical_records(root, lambda number: structure.records[number])
    return ArgumentStructure(intern(records, len(records) - 1), list(numbers))


class NoFunctionError(Exception):
    """The argument in the place of the function cannot be called. `TakingOperands` catches this."""


class TakingOperands:
    """The kind of adapter for transforms with operands beside the function. An instance is registered for a transform.

    Args:
        adapter: (a `CallWithOperands`, the arguments of the transform by the names of its parameters) → the result. If
            the transform has `**kwargs`, the adapter gets their entries one by one. If the adapter has a parameter with
            the name of `**kwargs`, it gets them there as one dictionary.
        writes: True if the transform can write back changes of the operands. Otherwise `in_place=True` is an error.
        calls_each_time: True if each call of the transform calls the function. See `rules_of_call`.
    """

    def __init__(self, adapter: Callable[..., Any], *, writes: bool = True, calls_each_time: bool = False) -> None:
        self.adapter = adapter
        self.writes = writes
        self.calls_each_time = calls_each_time

    def wrap(self, transform: Callable[..., Any], policy: PolicyOption, options: Mapping[str, Any]) -> Any:
        """Returns the transform with identities preserved: a function with the parameters of the transform.

        That function raises a ValueError under `in_place=True` if the transform cannot write back.

        Args:
            transform: the vanilla transform.
            policy: what carries identity. None for the policy of the thread at each call.
            options: options of the transform, bound in advance.
        """
        # Signatures are read once, and not in each call.
        signature = inspect.signature(transform)
        adapter_parameters = inspect.signature(self.adapter).parameters
        title = title_of(transform)

        @api_boundary
        def preserving(*operands: Any, **more: Any) -> Any:
            """Calls the adapter. For wrong arguments, calls the transform itself, for its own error."""
            keywords = {**options, **more}
            # Removes the options of the package from `keywords`, and returns the policy with these options.
            chosen_policy = with_options(keywords, policy)
            try:
                bound = signature.bind(*operands, **keywords)
            except TypeError:
                # The arguments do not fit the signature. The transform raises its own error.
                return transform(*operands, **keywords)
            call = CallWithOperands(
                transform, title, chosen_policy, writes=self.writes, calls_each_time=self.calls_each_time
            )
            if not self.writes:
                forbid_in_place(call.policy, title)
            with contextlib.suppress(NoFunctionError):
                return self.adapter(call, **_by_name(bound, adapter_parameters))
            # The block ended with a `NoFunctionError`: nothing callable was passed. The transform raises its own error.
            return transform(*operands, **keywords)

        functools.update_wrapper(preserving, transform, updated=())
        preserving.__doc__ = f"`{title}`, with identities preserved; see `preserve_identities`."
        return preserving


def _by_name(bound: inspect.BoundArguments, adapter_parameters: Container[str]) -> dict[str, Any]:
    """Returns the arguments of a transform by name, as its adapter takes them.

    Args:
        bound: the arguments, bound to the transform's signature. `*args` are one tuple, and `**kwargs` one dictionary.
        adapter_parameters: names of the adapter's parameters. If the name of `**kwargs` is not among them, the entries
            of that dictionary are passed one by one.
    """
    parameters = bound.signature.parameters.items()
    # The name of `**kwargs` if its entries are passed one by one. Otherwise nothing.
    unpacked = [name for name, p in parameters if p.kind is p.VAR_KEYWORD and name not in adapter_parameters]
    arguments = dict(bound.arguments)
    for name in unpacked:
        arguments |= arguments.pop(name, {})
    return arguments


CallWithOperands.__module__ = __name__.rpartition(".")[0]  # under which it is printed, pickled and documented
