"""One call of a transform that takes operands, and the four things that its adapter does with it.

- *enter*: packs the operands in one numbering, each with its treatment.
- *function*: what the transform sees in place of a function of the user's.
- *apply*: calls the transform.
- *leave*: unpacks what the transform hands back of what a function returned.

    def one_element(inside, x):                              # what the transform gets for one call of the function
        return inside.pack(inside.call(x))

    def map_over(crossing, f, xs):                           # the adapter of a transform `map_over(f, xs)`
        (xs,) = crossing.enter(f, {"xs": xs})
        one = crossing.function(f, one_element)
        return crossing.leave(crossing.apply(one, xs))

What a transform makes in the shape of its operands, as gradients are, no function returned (`_tangents`, `_likes`).
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from typing import Any

import jax
from jax import tree_util as jtu

from .._context import PolicyOption, current_policy, with_options
from .._errors import InconsistentSharingError
from .._jax_internals import api_boundary
from .._node_types import carries_identity
from .._structure import LEAF, Node, Update
from ._applying import title_of
from ._calling import calling
from ._crossed import Names, is_packed, packed_in, with_each
from ._cuts import treated
from ._in_place import InPlace
from ._inner import Inner, Learned, shared_by
from ._inside import Inside, Terms
from ._lowering import Lowering, lowered
from ._occurrences import Occurrences, Root, occurrences
from ._packing import Call, pack_call, unpack_result
from ._treatments import Treatment
from .checks._functions_given import forbid_bound_module


class Crossing:
    """One call of a transform.

    Args:
        transform: the vanilla transform.
        title: what it is called in errors.
        policy: what counts as sharing; None for that of the thread.

    Attributes:
        names: of the operands.
        call: the packed operands, and the objects that they were packed from.
        noted: the records whose leaves, when a trace had the operands packed in another way, had lost ties on purpose.
    """

    def __init__(self, transform: Callable[..., Any], title: str, policy: PolicyOption, *, writes: bool = True) -> None:
        self.transform = transform
        self.title = title
        self.policy = current_policy(policy)
        self.is_told = policy is not None
        self.writes = writes
        self.names: Names
        self.call: Call
        self.noted: frozenset[int] = frozenset()

    def enter(
        self,
        function: Callable[..., Any],
        operands: Mapping[str, Any],
        treatments: Mapping[str, str] | Treatment | None = None,
    ) -> tuple[Any, ...]:
        """Packs operands, in their order, in one numbering.

        Args:
            function: the user's function, which warnings are about.
            operands: by the names that they have in errors.
            treatments: what the transform does to each, if not the same to all.

        Raises:
            InconsistentSharingError: if a module that holds traced leaves would be treated in two ways.
            CycleError: if an object contains itself.
        """
        self.names = Names(function, list(operands))
        call = pack_call(tuple(operands.values()), {}, (), self.policy.rules, self.names)
        if treatments is not None and not isinstance(treatments, Treatment):
            labels = [treatments[name] for name in operands]
            treatments = Treatment(lambda position: labels[int(position)])
        if treatments is not None:
            call = treated(call, (), (treatments,), self.names, self.title)
        self.call = call
        return call.args

    def enter_call(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Packs what a function is to be called with, all of it treated alike; its parameters name it in errors."""
        self.names = Names(function)
        self.call = pack_call(tuple(args), dict(kwargs), (), self.policy.rules, self.names)
        return self.call.args, self.call.kwargs

    def function(
        self, function: Callable[..., Any], body: Callable[..., Any], *key: Hashable, caches_traces: bool = True
    ) -> Inner:
        """What the transform sees in place of a function of the user's; made once for each function and body.

        Args:
            function: the user's function.
            body: (an `Inside`, what the transform calls with) → what the transform gets. A function of the adapter's
                module: the first that was given for a key serves all.
            key: what else the body depends on.
            caches_traces: whether a trace serves many calls, so that a retrace is worth a word.
        """
        if not callable(function):
            raise NoFunctionError  # so that the transform is asked to say so
        shared = shared_by(function, (self.transform, body, *key), {"names": tuple(self.names.positional)})
        inner = shared.inner.get(self.policy)
        if inner is None:
            forbid_bound_module(function, self.policy, self.title)
            names = Names(function, self.names.positional)
            terms = Terms(
                self.transform,
                self.title,
                names,
                self.policy,
                shared.traces,
                shared.seen,
                caches_traces,
                self.is_told,
                self.writes,
                Learned(),
            )
            made = Inner(function, shared.hold, functools.partial(_run, terms, body), terms)
            inner = shared.inner.setdefault(self.policy, made)
        return inner

    def apply(self, *args: Any, **options: Any) -> Any:
        """What the transform makes of packed operands; functions that it traces meanwhile know of this call."""
        with calling(self.transform, self.call):
            return self.transform(*args, **options)

    def leave(self, *results: Any, with_state: Sequence[int] = ()) -> Any:
        """Unpacks what was packed inside; what was changed in place is then written, all or nothing.

        Args:
            results: each packed in one numbering.
            with_state: which of them were packed with `Inside.pack_with_state`.

        Returns:
            The result, or a tuple of several.
        """
        if not self.policy.in_place:
            unpacked = [unpack_result(result, nothing_given) for result in results]
        else:
            changes, objects = InPlace(self.call), self.call.tags.objects
            pending = None if self.call.cuts else changes.pending
            self._require_one_content(results)
            unpacked = [
                unpack_result(result, lambda _: objects.__getitem__, changes.update, pending) for result in results
            ]
            changes.commit()
            unpacked = [each[1] if i in with_state else each for i, each in enumerate(unpacked)]
        return unpacked[0] if len(unpacked) == 1 else tuple(unpacked)

    def _require_one_content(self, results: Sequence[Any]) -> None:
        """Raises if a container that was cut into two would be written back into one."""
        found = [argument.structure for result in results for argument in packed_in(result, "result")]
        numbers = {op.number for structure in found for op, _ in structure.records if type(op) is Update}
        seen: dict[int, int] = {}
        for number in sorted(numbers):
            obj = self.call.tags.objects[number]
            other = seen.setdefault(id(obj), number)  # alive in the tags
            if other != number:
                found = self._occurrences_of(obj)
                raise InconsistentSharingError(
                    f"`{self.title}` cut a `{type(obj).__name__}` that is in several places, for the function parted "
                    "them, and more than one was changed:\n" + "\n".join(found.lines) + "\n"
                    "They cannot be written back into one. Let the function keep them one, or give each place its own "
                    "before the call:\n"
                    "    model = sharedtree.untie(model)",
                    found.paths,
                    found.treatments,
                )

    def _occurrences_of(self, obj: Any) -> Occurrences:
        """Where in the operands an object is that was cut, and which of its parts is there."""
        graph = self.call.graph
        parts = [number for number, each in enumerate(self.call.tags.objects) if each is obj]

        def below(number: int) -> Sequence[tuple[object, int]]:
            op, children = graph.records[number]
            return list(zip(op.keys, children, strict=True)) if type(op) is Node else ()

        return occurrences(
            [Root(module.position, module.path, module.structure.root) for module in graph.modules],
            below,
            lambda _, number: f"number {parts.index(number) + 1} inside" if number in parts else None,
            self.names.text,
        )

    def lower(self, how: Lowering) -> None:
        """Packs the operands in another way."""
        packed, tags = lowered(self.call.graph, how)
        self.call = self.call._replace(args=with_each(self.call.args, packed), tags=tags)
        self.noted = how.noted | {new for new, old in enumerate(how.origins) if old in self.noted}

    @property
    def form(self) -> Any:
        """What the operands are outside modules, and the types of all leaves; None if JAX will refuse one."""
        try:
            types = tuple(map(jax.typeof, jtu.tree_leaves(self.call.args)))
        except TypeError:
            return None
        return jtu.tree_structure(self.call.args, is_leaf=is_packed), types

    @property
    def objects(self) -> frozenset[int]:
        """The numbers of what carries identity in the operands."""
        each = enumerate(zip(self.call.graph.records, self.call.tags.objects, strict=True))
        return frozenset(
            number
            for number, ((op, _), obj) in each
            if (op.type.carries_identity if type(op) is Node else op is LEAF and carries_identity(obj))
        )

    def paths_to(self, chosen: Callable[[Any], bool]) -> str:
        """Where some leaves of the operands are, each at its first path, in words."""
        leaves = [(position, jtu.tree_flatten_with_path(value)[0]) for position, value in self.call.items()]
        paths = [self.names.text(position, path) for position, each in leaves for path, leaf in each if chosen(leaf)]
        return " and ".join([f"`{path}`" for path in paths])

    @property
    def packed(self) -> list[Any]:
        """The packed modules of all operands, in order."""
        return [module.packed for module in self.call.modules]


def _run(terms: Terms, body: Callable[..., Any], function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return body(Inside(terms, function), *args, **kwargs)


def nothing_given(_: Any) -> Callable[[int], Any]:
    """For `unpack_result`, where no result names an object of the caller's."""
    return _no_object


def _no_object(number: int) -> Any:
    raise AssertionError(f"no result of these transforms names an object of the caller's, but this one names {number}")


class NoFunctionError(Exception):
    """What an operand-taking transform was given as a function cannot be called."""


class TakingOperands:
    """How a transform that takes operands beside the function is wrapped.

    Args:
        adapter: (a `Crossing`, the transform's own parameters by name) → the result. Keywords that are no parameters
            are options of the transform; or, if the adapter takes them as one, arguments of the function.
        writes: whether it can write back what the function changed in its operands; otherwise it is never called in
            place.
    """

    def __init__(self, adapter: Callable[..., Any], *, writes: bool = True) -> None:
        self.adapter = adapter
        self.writes = writes

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
            crossing = Crossing(transform, title, chosen, writes=self.writes)
            if crossing.policy.in_place and not self.writes:
                raise ValueError(
                    f"`{title}` hands back what the function returned, not what it changed, so nothing could be "
                    "written back in place. Return what changes:\n"
                    f"    sharedtree.preserve_identities({title}, in_place=False)"
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
