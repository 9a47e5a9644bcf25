"""The function's side of a transform: what a function receives, and what becomes of its results.

Of a transform that takes operands, an adapter says in a function of its own, its *body*, how one trace goes: which
packed operands the user's function is called with, and how its results are packed for the transform.

    def iteration(inside, carry, x):                  # for `jax.lax.scan`
        carried, emitted = inside.call(carry, x)
        return inside.pack(carried, as_operand=True), inside.pack(emitted)
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from .._context import Policy
from .._graph import Rules, Tags
from .._jax_internals import current_traces
from .._structure import LEAF, intern
from .._tied_values import note_one_around, which_are_tied_values
from .._untying import Said, hand_on, noting_untied, which_are_noted
from ._calling import caller_of
from ._crossed import Argument, Graph, Names, is_container, packed_in
from ._in_place import pack_detached, rules_for_state
from ._inner import Learned
from ._packing import Entered, pack_tree, unpack_call
from .checks._between_calls import SeenModules
from .checks._leaks import forbid_tracers
from .checks._left_behind import report_left_behind, traced_under
from .checks._retracing import Traces
from .checks._untied import report_lost_ties
from .checks._values import report_tied_values


class Terms(NamedTuple):
    """What all traces of one function under one transform have in common.

    Attributes:
        owner: of the calls in which it is traced.
        title: what the transform is called in errors.
        names: of the operands, and where the function is defined.
        policy: what counts as sharing.
        traces: those of the function.
        seen: the modules it was traced with.
        caches_traces: whether a trace serves many calls, so that a retrace is worth a word.
        is_told: whether it was said of this transform what its policy is.
        writes: whether it could be in place.
        lowerings: how operands have to be packed instead, as earlier traces have taught; if it takes operands.
    """

    owner: Any
    title: str
    names: Names
    policy: Policy
    traces: Traces
    seen: SeenModules
    caches_traces: bool
    is_told: bool
    writes: bool = True
    lowerings: Learned | None = None


class Inside:
    """One trace of a function.

    Args:
        terms: what all its traces have in common.
        function: the user's function.

    Attributes:
        entered: what it was called with.
        outer: the traces around it.
    """

    def __init__(self, terms: Terms, function: Callable[..., Any]) -> None:
        self.terms = terms
        self.entered = Entered([], {}, Graph(()))
        self._function = function
        self._said: Sequence[Said] = ()
        caller = caller_of(terms.owner)
        self._caller = None if caller is None else caller.call
        self.outer = enclosing_traces() if caller is None else caller.outer

    def call(
        self,
        *operands: Any,
        named: Mapping[str, Any] | None = None,
        apart: bool = False,
        again: bool = False,
        keeps_state: bool = True,
    ) -> Any:
        """What the user's function makes of packed operands.

        Args:
            operands: of one numbering.
            named: further ones, by the names of the function's parameters.
            apart: each has a numbering of its own.
            again: it was called with the same before, and the result checked.
            keeps_state: whether, under `Policy(in_place=True)`, what it changed in them is written back.

        Warns, at the name of the function, of ties that are lost in it.

        Raises:
            StaticTracerError: if a tracer is left in a static leaf of the result.
            UntiedError: under `Policy(on_untie="error")`.
        """
        separate = [(operand,) for operand in operands] if apart else [operands]
        each = [unpack_call(group, dict(named or {}), ()) for group in separate]
        result = self.call_with(each[0], *[arg for one in each for arg in one.args], **each[0].kwargs)
        if not again:
            self._check_with_state(result, keeps_state=keeps_state)
        return result

    def _check_with_state(self, result: Any, *, keeps_state: bool) -> None:
        terms, received, tags = self.terms, self.entered.graph, Tags()
        if not (terms.policy.in_place and keeps_state):
            self.check(self.pack_checked(result, tags), tags.objects)
            return
        rules = rules_for_state(terms.policy.rules, received, lambda _: False)
        state = self.pack_state(tags, rules)
        self.check(self.pack_checked(result, tags, rules), tags.objects, state)

    def call_with(self, entered: Entered, *args: Any, **kwargs: Any) -> Any:
        """What the user's function makes of arguments that were unpacked."""
        terms, caller = self.terms, self._caller
        self.entered = entered
        if caller is not None:
            report_tied_values(caller.items(), terms.names, terms.title, terms.policy)
        if terms.caches_traces:
            terms.traces.add(entered, terms.names)
        if caller is not None:
            objects, received = caller.tags.objects, entered.graph
            leaves = [n for n, (op, _) in enumerate(received.records) if op is LEAF and n < len(objects)]
            hand_on([objects[n] for n in leaves], [received.objects[n] for n in leaves])
        if terms.policy.containers:
            received = entered.graph
            roots = [a.structure.root for a in received.modules if is_container(a.packed)]
            note_one_around(received.records, roots, received.objects)
        with noting_untied() as self._said, traced_under(terms.policy, is_told=terms.is_told):
            result = self._function(*args, **kwargs)
        if not (terms.policy.in_place or terms.is_told):
            report_left_behind(entered.graph, result, terms.names, terms.title, terms.policy, writes=terms.writes)
        return result

    def pack_checked(self, result: Any, tags: Tags, rules: Any = None, name: str = "result") -> Any:
        """A result packed, with no tracer of this trace left in a static leaf.

        Args:
            result: what the function returned.
            tags: gets the objects in it.
            rules: those of the policy, or others.
            name: what it is called in errors.

        Raises:
            StaticTracerError: if one is.
        """
        rules = self.terms.policy.rules if rules is None else rules
        return pack_tree(result, tags, rules._replace(on_static=forbid_tracers(self.outer)), name)

    def pack_state(self, tags: Tags, rules: Rules) -> list[Argument]:
        """In place, the arguments' modules as the function left them; otherwise nothing."""
        state: list[Argument] = []
        for argument in self.written.modules:
            name = self.terms.names.text(argument.position, argument.path)
            obj = self.written.objects[argument.structure.root]
            state.append(argument._replace(packed=self.pack_checked(obj, tags, rules, name)))
        return state

    def check(self, packed: Any, objects: Sequence[Any], changed: Sequence[Argument] = ()) -> None:
        """Warns, at the name of the function, of ties that are lost in it.

        Args:
            packed: its result.
            objects: what the records stand for.
            changed: what leaves it before the result, for it may have been changed in place.

        Raises:
            UntiedError: under `Policy(on_untie="error")`.
        """
        terms, received = self.terms, self.entered.graph
        policy, names = terms.policy, terms.names
        if terms.caches_traces and self._caller is not None:
            of_caller = self._caller.tags.objects
            if len(of_caller) >= len(received.objects):
                terms.seen.compare(received, of_caller.__getitem__, policy, names)
        report_lost_ties(received, Graph([*changed, *packed_in(packed, "result")], objects), self._said, policy, names)
        report_tied_values([("result", packed)], names, terms.title, policy)

    @property
    def written(self) -> Graph:
        """What was received and will be written to if it was changed: in place all of it, otherwise nothing."""
        received = self.entered.graph
        return received if self.terms.policy.in_place else Graph((), received.objects)

    def pack(self, result: Any, tags: Any = None, *, as_operand: bool = False) -> Any:
        """A result, or a part of one, packed in a numbering of its own.

        Args:
            result: what the function returned.
            tags: gets the objects in it.
            as_operand: whether its structure is compared with that of an operand, which does not say which leaves have
                lost their ties on purpose.
        """
        packed = pack_tree(result, Tags() if tags is None else tags, self.terms.policy.rules, "result")
        return packed if as_operand else with_notes(packed)

    def pack_with_state(self, result: Any, *operands: int) -> Any:
        """A result together with what was changed in some operands; under `Policy(in_place=True)`.

        Args:
            result: what the function returned.
            operands: their positions. What is changed in them goes out as the result does.
        """
        if not self.terms.policy.in_place:
            return self.pack(result)
        received = self.entered.graph
        chosen = [module for module in received.modules if module.position in operands]
        own = {n for module in chosen for n, _ in enumerate(module.structure.records, module.structure.base)}
        rules = rules_for_state(self.terms.policy.rules, received, lambda number: number not in own)
        rules = rules._replace(updated={key: number for key, number in rules.updated.items() if number in own})
        tags = Tags()
        state = [pack_tree(received.objects[module.structure.root], tags, rules, "result") for module in chosen]
        detached = pack_detached(received, tags, rules, rules.updated.values(), self.terms.names)
        state += [argument.packed for _, argument in detached]
        return with_notes((state, pack_tree(result, tags, rules, "result")))


def with_notes(packed: Any) -> Any:
    """A packed result whose structures say which leaves have lost their ties on purpose."""
    for argument in packed_in(packed, "result"):
        noted = which_are_noted(argument.packed.leaves)
        tied = which_are_tied_values(argument.packed.leaves)
        # The structure is what JAX's caches keep of a result, so that it says so on every call.
        if noted or tied:
            known = argument.structure
            argument.packed.structure = intern(known.records, known.root, known.base, known.maker, noted, tied)
    return packed


def enclosing_traces() -> Sequence[Any]:
    """The traces around the one that a function is being traced in."""
    traces = current_traces()
    return traces if jax.config.jax_disable_jit else traces[1:]  # pyright: ignore[reportAttributeAccessIssue]
