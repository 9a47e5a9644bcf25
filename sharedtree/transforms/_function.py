"""Function transformers: `transform(f, **options) → g`. Pack, call, unpack; what a family needs on top it overrides."""

import functools
import inspect
import threading
import types
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax

from .._context import Policy, current_policy
from .._graph import Tags
from .._jax_internals import current_traces
from .._node_types import is_module
from .._structure import edges
from .._untying import noting_untied
from ._calling import Calling, active, calling
from ._crossing import (
    Argument,
    Call,
    Entered,
    Names,
    Position,
    pack_call,
    pack_tree,
    packed_in,
    unpack_call,
    unpack_result,
)
from ._in_place import InPlace, rules_for_state
from ._leaks import forbid_tracers
from ._passing_through import passed_through, unchanged
from ._retracing import Traces
from ._treatments import part_them, require_one_treatment
from ._untied import SeenModules, Side, report_lost_ties


class FunctionTransform:
    """A function under a transform, with shared modules and tied arrays kept the same objects.

    Args:
        transform: the vanilla transform.
        function: the user's function.
        policy: what counts as sharing; None for that of the thread at each call.
        options: of the transform.

    The transform is applied once for each policy, to a function that unpacks, calls and packs. It may cache what it
    likes: everything that the inner function learns about a call is in the arguments' structures.
    """

    passes_through = False
    caches_traces = False

    def __init__(
        self,
        transform: Callable[..., Any],
        function: Callable[..., Any],
        policy: Policy | None,
        options: dict[str, Any],
    ) -> None:
        self.transform = transform
        self.function = function
        self.policy = policy
        self.options = options
        self.names = Names(function)
        self.traces = Traces()
        self._seen = SeenModules()
        self._made: dict[Any, Any] = {}
        self._lock = threading.RLock()
        functools.update_wrapper(self, function, updated=())  # not its `__dict__`, which may be that of another wrapper
        self.__wrapped__ = function
        self.check_options()

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        policy = self.policy or current_policy()
        call = self.pack(args, kwargs, policy)
        with calling(call):
            result = self.transformed(policy)(*call.args, **call.kwargs)
        return self.finish(result, call, policy)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __repr__(self) -> str:
        return (
            f"<{self.transform_name}({getattr(self.function, '__qualname__', self.function)!s}), identities preserved>"
        )

    @property
    def transform_name(self) -> str:
        """What the transform is called in errors."""
        return _name_of(self.transform)

    def check_options(self) -> None:
        """Applies the transform at once, so that it can refuse its options or the function as it always does."""
        if callable(self.function):
            self.transformed(self.policy or current_policy())
        else:
            self.transform(self.function, **self.options)

    # What families override -------------------------------------------------------------------------------------

    def static_positions(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Collection[Position]:
        """The arguments that are not packed."""
        return ()

    def treatment(self, argument: Argument, num_args: int) -> Any:
        """What the transform does to a module in the arguments; compared, and named in errors."""
        return None

    def require_one_treatment(self, entered: Entered) -> None:
        """Raises `InconsistentSharingError` if some object would be treated in two ways."""
        arguments = [(argument, self.treatment(argument, len(entered.args))) for argument in entered.arguments]
        if len({treatment for _, treatment in arguments}) > 1:
            require_one_treatment(
                arguments,
                entered.records,
                self.names,
                transform=self.transform_name,
                fix=part_them(self.names, entered.arguments),
            )

    def treatments(self, call: Call) -> dict[int, str]:
        """What the transform does to each traced leaf in the arguments of a call, if it is worth a word."""
        found: dict[int, str] = {}
        arguments = [a for position, value in call.items() for a in packed_in(value, position)]
        records = [record for a in arguments for record in a.structure.records]
        for argument in arguments:
            label = self.treatment(argument, len(call.args))
            if label is not None and not label.startswith("not "):
                found |= {number: label for number, _ in edges(records, [((), argument.structure.root)])}
        return found

    # The two sides ------------------------------------------------------------------------------------------------

    def pack(self, args: Sequence[Any], kwargs: dict[str, Any], policy: Policy) -> Call:
        """The caller's side, going in."""
        return pack_call(args, kwargs, self.static_positions(args, kwargs), policy.rules, self.names)

    def finish(
        self, result: Any, call: Call, policy: Policy, used: Callable[[Call], Sequence[Any]] | None = None
    ) -> Any:
        """The caller's side, coming out."""
        if policy.in_place:
            changes = InPlace(call.tags.objects)
            result = unpack_result(result, lambda _: call.tags.objects.__getitem__, changes.update)
            changes.commit()
            return result[1]
        return unpack_result(result, lambda structures: passed_through(call, structures, used or self.used))

    def transformed(self, policy: Policy) -> Any:
        """The transformed function under a policy, made on first use."""
        made = self._made.get(policy)
        if made is None:
            with self._lock:
                made = self._made.setdefault(policy, self.transform(self.inner(policy), **self.options))
        return made

    def inner(self, policy: Policy) -> Callable[..., Any]:
        """The function that the transform sees."""

        def inner(*args: Any, **kwargs: Any) -> Any:
            current = self._current(policy)
            entered = unpack_call(args, kwargs, self.static_positions(args, kwargs))
            self.require_one_treatment(entered)
            if self.caches_traces:
                self.traces.add(entered, self.names)
            with noting_untied() as noted:
                result = self.function(*entered.args, **entered.kwargs)
            return self.pack_results(result, entered, policy, noted, current)

        functools.update_wrapper(inner, self.function, updated=())
        inner.__name__ = getattr(self.function, "__name__", type(self.function).__name__)
        if is_module(self.function):  # Equinox would look inside it, and warn of arrays that nothing is done with
            del inner.__dict__["__wrapped__"]
            inner.__signature__ = inspect.signature(self.function)  # pyright: ignore[reportFunctionMemberAccess]
        return inner

    def _current(self, policy: Policy) -> Calling:
        """The caller's side of this call. If a plan packed it, it is packed anew, before the function can change it."""
        entry = active.stack[-1]
        if not isinstance(entry, Calling):
            traces = current_traces()
            outer = traces if jax.config.jax_disable_jit else traces[1:]  # pyright: ignore[reportAttributeAccessIssue]
            entry = active.stack[-1] = Calling(self.pack(*entry, policy), outer)
        return entry

    def pack_results(self, result: Any, entered: Entered, policy: Policy, noted: Any, current: Calling) -> Any:
        """The function's side, going out."""
        rules = policy.rules._replace(on_static=forbid_tracers(current.outer))
        tags = Tags()
        if policy.in_place:
            rules = rules_for_state(rules, entered, self.is_taken(entered))
            state = [
                pack_tree(entered.table[a.structure.root], tags, rules, self.names.text(a.position, a.path))
                for a in entered.arguments
            ]
            packed: Any = (state, pack_tree(result, tags, rules, "result"))
        else:
            if policy.pass_through and self.passes_through:
                rules = rules._replace(given=unchanged(result, entered, self.is_taken(entered)))
            packed = pack_tree(result, tags, rules, "result")
        before = Side(
            entered.records,
            entered.table,
            [(self.names.text(a.position, a.path), a.structure.root) for a in entered.arguments],
        )
        left = list(packed_in(packed, "result"))
        after = Side(
            [record for a in left for record in a.structure.records],
            tags.objects,
            [(self.names.text("result", a.path), a.structure.root) for a in left],
        )
        if self.caches_traces:
            self._seen.compare(
                before, [a.structure for a in entered.arguments], current.call.tags.objects.__getitem__, policy
            )
        report_lost_ties(before, after, noted, policy)
        return packed

    def used(self, call: Call) -> Sequence[Any]:
        """The leaves among the arguments that the transformed function uses, as far as the transform drops others."""
        return ()

    def is_taken(self, entered: Entered) -> Callable[[int], bool]:
        """Whether an argument's record may not be passed through, because its buffers are taken from the caller."""
        return lambda _: False


class UnregisteredTransform(FunctionTransform):
    """A transform that nothing is known about: what it does to each argument is hidden, so none may be tied to another.

    Ties inside one argument are kept. A vmap with `in_axes=(0, None)` hidden in a lambda would otherwise map one
    occurrence of an object and not the other, and silently compute something else.
    """

    def pack(self, args: Sequence[Any], kwargs: dict[str, Any], policy: Policy) -> Call:
        """As the base; refuses ties across arguments, and mutation, whose results would have no place."""
        if policy.in_place:
            raise ValueError(
                f"`Policy(in_place=True)` adds to what a function returns, which `{self.transform_name}` may not "
                "stand: it is not registered. Say that it is a plain function transformer:\n"
                "    sharedtree.register_transform(transform)"
            )
        call = super().pack(args, kwargs, policy)
        arguments = [a for position, value in call.items() for a in packed_in(value, position)]
        records = [record for a in arguments for record in a.structure.records]
        require_one_treatment(
            [(a, a.position) for a in arguments],
            records,
            self.names,
            transform=self.transform_name,
            describe=lambda position: f"in `{self.names.text(position)}`, whose treatment is not known",
            fix=(
                "The transform is not registered, so it may treat these arguments differently without a way to tell. "
                "If it treats all arguments alike, say so, once:\n"
                "    sharedtree.register_transform(transform)\n"
                "or, if it is some other transform with options of its own: sharedtree.register_transform(transform, "
                "jax.vmap).\n" + part_them(self.names, arguments)
            ),
        )
        return call


def _name_of(transform: Any) -> str:
    name = getattr(transform, "__qualname__", repr(transform))
    module = str(getattr(transform, "__module__", "")).partition(".")[0]
    return f"{module}.{name}" if module in ("jax", "equinox") else name
