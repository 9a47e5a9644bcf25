"""`equinox.filter_closure_convert`: a function becomes a pytree that holds what the function closed over.

The jaxpr inside is that of the packed function, so whoever calls it later must give models with the structure of those
that it was made with. A function without a closure is not traced; Equinox calls it as it is, and so do we, with the
caller's own objects: Equinox is given `_handed_on` in its place, which only checks the arguments.

    filter_closure_convert(f, Net(w, w))(Net(a, a))        Equinox's function is called with Hand([a])
    filter_closure_convert(f, Net(w, w))(Net(a, b))        an error, for there is room for one
"""

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx

from ..core._call_arguments import Arguments
from ..core._jax_internals import api_boundary
from ..core._structure import Structure
from ..core._trees_taken_apart import Walked
from ..ties._policy_and_context import Policy
from ._argument_names import Names
from ._caller_side import Dealing, enter, leave
from ._crossing import Crossing
from ._function_side import Inside
from ._function_transform import rules_of_call
from ._hands import Hand, whole
from ._meet_of_trees import Words, fitted, holds_modules
from ._shape_evaluation import NO_KEYWORDS, filter_eval_shape


class How(NamedTuple):
    """What a converted function does beside calling Equinox's.

    Attributes:
        title: what the transform is called in errors.
        policy: what counts as sharing.
        names: of the positional arguments.
        structure: of the arguments that it was made with.
        closureless: the user's function, if it has no closure.
    """

    title: str
    policy: Policy
    names: tuple[str, ...]
    structure: Structure
    closureless: Callable[..., Any] | None


class Converted(eqx.Module):
    """What Equinox returns, made to take and to give models with sharing. Its leaves are the same."""

    function: Any
    how: How = eqx.field(static=True)

    @api_boundary
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        result = self.function(self._fitted(args, kwargs))
        if self.how.closureless is not None:
            return self.how.closureless(*args, **kwargs)
        return leave((result,))

    @property
    def in_struct(self) -> Any:
        """The arguments that it was made with, positional and by keyword, with shapes in place of arrays."""
        ((hand,), _) = self.function.in_struct
        made = leave((hand,))
        return tuple(made.args), made.kwargs

    @property
    def out_struct(self) -> Any:
        """What it returns, with shapes in place of arrays."""
        if self.how.closureless is None:
            return leave((self.function.out_struct,))
        args, kwargs = self.in_struct
        crossing = Crossing(eqx.filter_eval_shape, self.how.title, self.how.policy)
        return filter_eval_shape(crossing, self.how.closureless, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        """Whatever else Equinox's has: `consts`, `jaxpr`."""
        if name == "function":  # while this is being made
            raise AttributeError(name)
        return getattr(self.function, name)

    def _fitted(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Hand:
        """Arguments in the hand of those that it was made with.

        Raises:
            SharingMismatchError: if they lack a tie, or differ in shape or static values.
        """
        how = self.how
        names = (*how.names[: len(args)], *[f"args[{i}]" for i in range(len(how.names), len(args))])
        call = enter(Arguments(names, args, kwargs), _rules(how.policy), Dealing(how.title, lambda _: ()))
        call.end()
        if call.tree.structure is how.structure:
            return call.hands[0]
        before = Walked.of(how.structure, [None] * len(how.structure.records))
        words = Words(how.title, "in the example arguments", "in those of the call")
        return whole(fitted(before, call.tree, words), how.structure)


def _rules(policy: Policy) -> Any:
    return rules_of_call(policy, filtered=True)


def filter_closure_convert(
    crossing: Crossing, fn: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] = NO_KEYWORDS
) -> Any:
    """`equinox.filter_closure_convert`."""
    if not callable(fn):
        return crossing.transform(fn, *args, **kwargs)  # says best what is wrong
    hand = crossing.enter_call(fn, args, kwargs)
    is_closureless = isinstance(fn, types.FunctionType) and fn.__closure__ is None
    if is_closureless and not holds_modules(crossing.call.tree):
        return crossing.transform(fn, *args, **kwargs)
    inner = _handed_on if is_closureless else crossing.function(fn, _whole, caches_traces=False)
    names = Names(fn).of(len(args))
    how = How(crossing.title, crossing.policy, names, hand.structure, fn if is_closureless else None)
    return Converted(crossing.apply(inner, hand), how)


def _handed_on(hand: Hand) -> None:
    """Called by Equinox after it has checked the arguments."""


def _whole(inside: Inside, hand: Hand) -> Any:
    return inside.pack(inside.call(hand))
