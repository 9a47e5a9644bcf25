"""One call of a transform that takes operands, and the four things that its adapter does with it.

- *enter*: takes the operands apart as one graph, and groups the leaves by label.
- *function*: what the transform sees in place of a function of the user's.
- *apply*: calls the transform.
- *leave*: puts together what the transform hands back of what a function returned.

    def one_element(inside, x):                              # what the transform gets for one call of the function
        return inside.pack(inside.call(x))

    def map_over(crossing, f, xs):                           # the adapter of a transform `map_over(f, xs)`
        (xs,) = crossing.enter(f, {"xs": xs})
        one = crossing.function(f, one_element)
        return crossing.leave(crossing.apply(one, xs))
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
from ._caller_side import Call, Grouping, enter, leave, repacked
from ._function_and_options import in_code, is_of_equinox
from ._function_given_to_jax import Inner, Learned, shared_by
from ._function_side import Inside, Terms
from ._function_transform import rules_of_call
from ._in_place import Changes
from ._joining_trees import Repacking
from ._leaf_groups import LeafGroup, whole
from ._leaf_labels import Treatment
from ._option_lists import title_of
from .checks._lost_changes import Unsaid
from .checks._refused_arguments import forbid_bound_module


class Crossing:
    """One call of a transform.

    Args:
        transform: the vanilla transform.
        title: what it is called in errors.
        policy: what counts as sharing; None for that of the thread.
        writes: whether it can write back what the function changed.
        calls_each_time: Whether the function is called in each call of the transform. See `rules_of_call`.

    Attributes:
        names: of the operands.
        call: the operands, taken apart and grouped.
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
        self.transform = transform
        self.title = title
        self.policy = current_policy(policy)
        self.writes = writes
        self.rules = rules_of_call(self.policy, filtered=is_of_equinox(transform), is_exact=calls_each_time)
        self.names: Names
        self.call: Call
        self._grouping: Grouping
        self._unsaid: list[Unsaid] = []

    def enter(
        self,
        function: Callable[..., Any],
        operands: Mapping[str, Any],
        treatments: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """Takes operands apart, in their order, as one graph.

        Args:
            function: the user's function, which warnings are about.
            operands: by the names that they have in errors.
            treatments: what the transform does to each, if not the same to all.

        Returns:
            A group for each treatment, in the order of the operands. But an array that is an operand by itself, and the
            only one with its treatment, crosses bare, unless it is the first: transforms look at such, as in `ts[1:]`.

        Raises:
            InconsistentSharingError: if a module that holds traced leaves would be treated in two ways.
            CycleError: if an object contains itself.
        """
        names = tuple(operands)
        labels = () if treatments is None else tuple([treatments[name] for name in names])
        treatment = Treatment("operands", Branch(labels), lambda label: isinstance(label, str))
        arguments = Arguments(names, tuple(operands.values()), {})
        if not labels:
            return list(self.enter_grouped(function, arguments, Grouping(self.title, lambda _: ())))
        own = [(label,) for label in dict.fromkeys(labels)]
        groups = self.enter_grouped(
            function, arguments, Grouping(self.title, lambda _: (treatment,), labels, None, own)
        )
        alone = {labels[i] for i, each in enumerate(arguments.args) if i and node_type_of(each) is None}
        bare = [labels.count(label) == 1 and label in alone for (label,) in own]
        return [group.leaves[0] if is_bare else group for group, is_bare in zip(groups, bare, strict=True)]

    def enter_grouped(
        self, function: Callable[..., Any], arguments: Arguments, grouping: Grouping
    ) -> Sequence[LeafGroup]:
        """The same with arguments and what is done with them."""
        self.names = Names(function, [str(name) for name in arguments.names])
        self._grouping = grouping
        self.call = enter(arguments, self.rules, grouping)
        return self.call.groups

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
        """What the transform sees in place of a function of the user's; made once for each function and body.

        Args:
            function: the user's function.
            body: (an `Inside`, what the transform calls with) → what the transform gets. A function of the adapter's
                module: the first that was given for a key serves all.
            key: what else the body depends on.
            caches_traces: whether a trace serves many calls, so that a retrace is worth a word.
            num_before: how many arguments the function is given before the operands.
            differentiates: whether the transform differentiates the leaves that are labelled True.
            adds: whether it could write back an object with more parts, or fewer.
            keeps: whether what the function changes is kept at all under `in_place=True`.
        """
        if not callable(function):
            raise NoFunctionError  # so that the transform is asked to say so
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
            own = Names(function).of(num_before + len(self.names.positional))
            made = Inner(function, shared.hold, functools.partial(_run, terms, body), terms, own, num_before)
            inner = shared.inner.setdefault(self.policy, made)
        return inner

    def apply(self, *args: Any, **options: Any) -> Any:
        """What the transform makes of groups; functions that it traces meanwhile know of this call."""
        return self.applied(self.transform, *args, **options)

    def applied(self, transform: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """The same with another transform in its place."""
        structure = self.call.tree.structure
        with self.call:
            result = transform(*args, **options)
        for unsaid in self._unsaid:
            unsaid.say(structure)
        return result

    def leave(self, *results: LeafGroup, with_state: Sequence[int] = ()) -> Any:
        """What the function returned, put together; what was changed in place is then written, all or nothing.

        Args:
            results: each a whole tree, or what came back for one operand, in its group.
            with_state: which of them were packed with `Inside.pack_with_state`, or are in place.

        Returns:
            The result, or a tuple of several.
        """
        own = self.call.plan.structure
        groups = [_alone(group) if group.structure is own else group for group in results]
        if not self.policy.in_place:
            made = [leave((group,)) for group in groups]
        else:
            changes = Changes(self.call, self.title)
            made = [leave((group,), self.call.objects.__getitem__, changes.update) for group in groups]
            changes.commit()
            made = [each[-1] if i in with_state else each for i, each in enumerate(made)]
        return made[0] if len(made) == 1 else tuple(made)

    def lower(self, how: Repacking) -> None:
        """Groups the operands with other ties, and with static numbers traced."""
        self.call = repacked(self.call, how, self._grouping)


def _alone(group: LeafGroup) -> LeafGroup:
    return whole(group.leaves, part_of(group.structure, group.operand)[0])


def part_of(structure: Structure, position: int) -> tuple[Structure, list[int]]:
    """The structure of one argument by itself, and the numbers that its records have in that of all."""
    root = structure.records[structure.root][1][position]
    records, numbers = canonical(root, lambda number: structure.records[number])
    return intern(records, len(records) - 1), list(numbers)


def _run(terms: Terms, body: Callable[..., Any], function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return body(Inside(terms, function), *args, **kwargs)


class NoFunctionError(Exception):
    """What an operand-taking transform was given as a function cannot be called."""


class TakingOperands:
    """How a transform that takes operands beside the function is wrapped.

    Args:
        adapter: (a `Crossing`, the transform's own parameters by name) → the result. Keywords that are no parameters
            are options of the transform; or, if the adapter takes them as one, arguments of the function.
        writes: whether it can write back what the function changed in its operands; otherwise it is never called in
            place.
        calls_each_time: Whether the function is called in each call of the transform. See `rules_of_call`.
    """

    def __init__(self, adapter: Callable[..., Any], *, writes: bool = True, calls_each_time: bool = False) -> None:
        self.adapter = adapter
        self.writes = writes
        self.calls_each_time = calls_each_time

    def applied(self, transform: Callable[..., Any], policy: PolicyOption, options: Mapping[str, Any]) -> Any:
        """The transform with identities preserved.

        Args:
            transform: the vanilla transform.
            policy: what counts as sharing; None for that of the thread at each call.
            options: of the transform, bound in advance.
        """
        signature = inspect.signature(transform)
        as_one = inspect.signature(self.adapter).parameters
        title = title_of(transform)

        @api_boundary
        def preserving(*operands: Any, **more: Any) -> Any:
            own = {**options, **more}
            chosen = with_options(own, policy)
            try:
                bound = signature.bind(*operands, **own)
            except TypeError:
                return transform(*operands, **own)  # says best what is wrong
            crossing = Crossing(transform, title, chosen, writes=self.writes, calls_each_time=self.calls_each_time)
            if crossing.policy.in_place and not self.writes:
                raise ValueError(
                    f"`{title}` hands back what the function returned, not what it changed, so nothing could be "
                    "written back in place. Return what changes:\n"
                    f"    inner = {in_code(title, 'in_place=False')}"
                )
            with contextlib.suppress(NoFunctionError):
                return self.adapter(crossing, **_by_name(bound, as_one))
            return transform(*operands, **own)  # as above

        functools.update_wrapper(preserving, transform, updated=())
        preserving.__doc__ = f"`{title}`, with identities preserved; see `preserve_identities`."
        return preserving


def _by_name(bound: inspect.BoundArguments, as_one: Container[str]) -> dict[str, Any]:
    """Arguments by the names of the parameters; those without names as one tuple, and keywords as one if asked for."""
    parameters = bound.signature.parameters.items()
    rest = [name for name, each in parameters if each.kind is each.VAR_KEYWORD and name not in as_one]
    found = dict(bound.arguments)
    for name in rest:
        found |= found.pop(name, {})
    return found


Crossing.__module__ = __name__.rpartition(".")[0]  # under which it is printed, pickled and documented
