"""One call of a transform that takes operands, and the four steps of its adapter.

- *enter*: packs the operands as one graph, and groups the leaves by label.
- *function*: makes what the transform gets in place of a function of the user's.
- *apply*: calls the transform.
- *leave*: builds the result of what the transform returns.

The transform gets *leaf groups* instead of the operands: their traced leaves, each once, as pytrees. *In place* means
that what the function changes in the operands is written back into the caller's objects.

    def one_element(trace, x):                           # what the transform gets for one call of the function
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
from typing import Any

from ..core._call_arguments import Arguments
from ..core._jax_internals import api_boundary
from ..core._node_types import node_type_of
from ..core._prefix_trees import Branch
from ..core._structure import Structure, canonical, intern
from ..ties._policy_and_context import PolicyOption, current_policy, with_options
from ._argument_names import Names
from ._caller_side import Call, Grouping, enter, leave, repack_call
from ._function_and_options import in_code, is_of_equinox
from ._function_given_to_jax import Inner, Learned, shared_by
from ._function_side import FunctionTrace, Terms
from ._function_transform import rules_of_call
from ._in_place import commit_changes
from ._joining_trees import Repacking
from ._leaf_groups import LeafGroup, single_group
from ._leaf_labels import Treatment
from ._option_lists import title_of
from .checks._lost_changes import Unsaid
from .checks._refused_arguments import forbid_bound_module


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
        """Takes the policy that is in force now, for the whole call."""
        self.transform = transform
        self.title = title
        self.policy = current_policy(policy)
        self.writes = writes
        self.rules = rules_of_call(self.policy, filtered=is_of_equinox(transform), is_exact=calls_each_time)
        # Set by `enter_grouped`.
        self.names: Names
        self.packed: Call
        self._unsaid: list[Unsaid] = []

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
            treatments: for each operand, its treatment by the transform, in words. None if all are treated alike.

        Returns:
            One leaf group for each treatment, in the order of the operands. Some transforms look at an array, as in
            `ts[1:]`. So an operand that is itself an array is returned as it is, if no other operand has its treatment.
            The first operand is always in a group.

        Raises:
            InconsistentSharingError: if a module that holds traced leaves would be treated in two ways.
            CycleError: if an object contains itself.
        """
        names = tuple(operands)
        # The label of an operand's leaves is its treatment in words.
        labels = () if treatments is None else tuple([treatments[name] for name in names])
        treatment = Treatment("operands", Branch(labels), lambda label: isinstance(label, str))
        arguments = Arguments(names, tuple(operands.values()), {})
        # No treatment at all makes one group of all leaves.
        if not labels:
            return list(self.enter_grouped(function, arguments, Grouping(self.title, lambda _: ())))
        group_labels = [(label,) for label in dict.fromkeys(labels)]
        groups = self.enter_grouped(
            function, arguments, Grouping(self.title, lambda _: (treatment,), labels, None, group_labels)
        )
        # The first operand stays in a group, since the function needs a group to build its arguments from.
        labels_of_leaves = {
            labels[i] for i, operand in enumerate(arguments.args) if i and node_type_of(operand) is None
        }
        # For each group, True if its only leaf is returned in its place.
        bare = [labels.count(label) == 1 and label in labels_of_leaves for (label,) in group_labels]
        return [group.leaves[0] if is_bare else group for group, is_bare in zip(groups, bare, strict=True)]

    def enter_grouped(
        self, function: Callable[..., Any], arguments: Arguments, grouping: Grouping
    ) -> Sequence[LeafGroup]:
        """Packs arguments, and groups their leaves as a grouping says. Returns the groups."""
        self.names = Names(function, [str(name) for name in arguments.names])
        self.packed = enter(arguments, self.rules, grouping)
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
        """Returns the function that the transform calls in place of the user's. It is made once for each body and key.

        Args:
            function: the user's function.
            body: (a `FunctionTrace`, the arguments from the transform) → result for the transform. Define it at the top
                level of a module: traces are found again by its identity.
            key: everything else on which the body depends.
            caches_traces: True if a trace serves many calls, so that a retrace is worth a warning.
            num_before: number of arguments before the operands.
            differentiates: True if the transform differentiates the leaves with the label True.
            adds: True if the transform can write back an object that has more children than before, or fewer.
            keeps: True if `in_place=True` keeps what this function changes. The condition of a loop keeps nothing.

        If the function is not callable, the transform's own error is raised in the end.
        """
        if not callable(function):
            # `TakingOperands` catches this, and calls the transform as it is.
            raise NoFunctionError
        # State of this function that outlives the call, such as its inner functions: one for each policy.
        shared = shared_by(function, (self.transform, body, *key), {"names": self.names.positional})
        self._unsaid.append(shared.unsaid)
        inner = shared.inner.get(self.policy)
        if inner is None:
            forbid_bound_module(function, self.policy, self.title)
            terms = Terms(
                self.title,
                Names(function, self.names.positional),
                self.policy,
                self.rules,
                shared.traces,
                shared.seen,
                shared.unsaid,
                caches_traces,
                self.writes,
                learned=Learned(),
                differentiates=differentiates,
                adds=adds,
                keeps=keeps,
            )
            # JAX's messages name the arguments as the function does, not as the operands of the transform.
            names_in_function = Names(function).of(num_before + len(self.names.positional))
            run = functools.partial(_run, terms, body)
            new_inner = Inner(function, shared.get_function, run, terms, names_in_function, num_before)
            # If another thread was faster, both take its inner function, so that JAX traces once.
            inner = shared.inner.setdefault(self.policy, new_inner)
        return inner

    def apply(self, *args: Any, **options: Any) -> Any:
        """Calls the transform with leaf groups, and returns its result. Traces meanwhile find this call."""
        return self.apply_other(self.transform, *args, **options)

    def apply_other(self, transform: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Calls another transform in the way in which `apply` calls the vanilla one."""
        structure = self.packed.tree.structure
        with self.packed:
            result = transform(*args, **options)
        # Warns of changes that were lost in an earlier trace which only this call ran.
        for unsaid in self._unsaid:
            unsaid.say(structure)
        return result

    def leave(self, *results: LeafGroup, with_state: Sequence[int] = ()) -> Any:
        """Builds the results of the function. In place, writes its changes into the caller's objects, all or nothing.

        Args:
            results: leaf groups, each of a whole tree or of one operand.
            with_state: positions of the results packed by `FunctionTrace.pack_with_state`.

        Returns:
            The result, or a tuple of the results if there are several.
        """
        structure_of_operands = self.packed.plan.structure
        groups = [_of_one_operand(group) if group.structure is structure_of_operands else group for group in results]
        if not self.policy.in_place:
            trees = [leave((group,)) for group in groups]
        else:
            trees = commit_changes(self.packed, self.title, *[(group,) for group in groups])
            # With state, a tree is a tuple of the changed objects, followed by the result.
            trees = [tree[-1] if i in with_state else tree for i, tree in enumerate(trees)]
        return trees[0] if len(trees) == 1 else tuple(trees)

    def repack(self, how: Repacking) -> None:
        """Packs and groups the operands again, with ties cut and static numbers traced as the repacking says."""
        self.packed = repack_call(self.packed, how)


def _of_one_operand(group: LeafGroup) -> LeafGroup:
    """Returns a group with the same leaves whose structure is that of their operand alone."""
    return single_group(group.leaves, structure_of_argument(group.structure, group.operand)[0])


def structure_of_argument(structure: Structure, position: int) -> tuple[Structure, list[int]]:
    """Returns the structure of one argument by itself, and for each of its records that in the whole structure."""
    root = structure.records[structure.root][1][position]
    # Numbers the records below the argument anew, in the order of a walk. The root is the last.
    records, numbers = canonical(root, lambda number: structure.records[number])
    return intern(records, len(records) - 1), list(numbers)


def _run(terms: Terms, body: Callable[..., Any], function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return body(FunctionTrace(terms, function), *args, **kwargs)


class NoFunctionError(Exception):
    """The argument in the place of the function cannot be called."""


class TakingOperands:
    """The kind of adapter for transforms with operands beside the function.

    Args:
        adapter: (a `CallWithOperands`, the arguments of the transform by the names of its parameters) → the result.
            Arguments for the transform's `**kwargs` arrive one by one. If the adapter has a parameter of that name,
            they arrive in it as one dictionary.
        writes: True if the transform can write back changes of the operands. Otherwise `in_place=True` is an error.
        calls_each_time: True if each call of the transform calls the function. See `rules_of_call`.
    """

    def __init__(self, adapter: Callable[..., Any], *, writes: bool = True, calls_each_time: bool = False) -> None:
        self.adapter = adapter
        self.writes = writes
        self.calls_each_time = calls_each_time

    def wrap(self, transform: Callable[..., Any], policy: PolicyOption, options: Mapping[str, Any]) -> Any:
        """Returns the transform with identities preserved: a function with the parameters of the transform.

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
            """Calls the adapter, or the transform itself where that raises its own error."""
            keywords = {**options, **more}
            # Takes the options of the package out of `keywords`.
            chosen_policy = with_options(keywords, policy)
            try:
                bound = signature.bind(*operands, **keywords)
            except TypeError:
                # The transform itself says best what is wrong.
                return transform(*operands, **keywords)
            call = CallWithOperands(
                transform, title, chosen_policy, writes=self.writes, calls_each_time=self.calls_each_time
            )
            if call.policy.in_place and not self.writes:
                raise ValueError(
                    f"`{title}` hands back what the function returned, not what it changed, so nothing could be "
                    "written back in place. Return what changes:\n"
                    f"    inner = {in_code(title, 'in_place=False')}"
                )
            with contextlib.suppress(NoFunctionError):
                return self.adapter(call, **_by_name(bound, adapter_parameters))
            # There was no function. The transform raises its own error.
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
    unpacked = [name for name, p in parameters if p.kind is p.VAR_KEYWORD and name not in adapter_parameters]
    arguments = dict(bound.arguments)
    for name in unpacked:
        arguments |= arguments.pop(name, {})
    return arguments


CallWithOperands.__module__ = __name__.rpartition(".")[0]  # under which it is printed, pickled and documented
