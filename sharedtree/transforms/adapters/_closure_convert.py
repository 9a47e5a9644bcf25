"""`equinox.filter_closure_convert`: a function becomes a pytree that holds what the function closed over.

The jaxpr inside is that of the packed function, so whoever calls it later must give models with the structure of those
that it was made with. A function without a closure is not traced; Equinox calls it as it is, and so do we, with the
caller's own objects: Equinox is given `_handed_on` in its place, which only checks the arguments.

    filter_closure_convert(f, Net(w, w))(Net(a, a))        Equinox's function is called with Packed([a])
    filter_closure_convert(f, Net(w, w))(Net(a, b))        an error, for there is room for one
"""

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
from jax import tree_util as jtu

from ..._context import Policy
from ..._jax_internals import api_boundary
from .._crossed import Graph, Names
from .._crossing import Crossing, nothing_given
from .._inside import Inside
from .._joining import Words, joined, leaves_like, packed_as, require_same_containers
from .._packing import pack_call, unpack_result
from ._shapes import NO_KEYWORDS, filter_eval_shape


class Given(NamedTuple):
    """What a converted function is called with, packed."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class How(NamedTuple):
    """What a converted function does beside calling Equinox's.

    Attributes:
        title: what the transform is called in errors.
        policy: what counts as sharing.
        treedef: of the packed arguments that it was made with.
        closureless: the user's function, if it has no closure.
    """

    title: str
    policy: Policy
    treedef: Any
    closureless: Callable[..., Any] | None


class Converted(eqx.Module):
    """What Equinox returns, made to take and to give models with sharing. Its leaves are the same."""

    function: Any
    how: How = eqx.field(static=True)

    @api_boundary
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        given = self._fitted(args, kwargs)
        result = self.function(*given.args, **given.kwargs)
        if self.how.closureless is not None:
            return self.how.closureless(*args, **kwargs)
        return unpack_result(result, nothing_given)

    @property
    def in_struct(self) -> Any:
        """The arguments that it was made with, positional and by keyword, with shapes in place of arrays."""
        return unpack_result(self.function.in_struct, nothing_given)

    @property
    def out_struct(self) -> Any:
        """What it returns, with shapes in place of arrays."""
        if self.how.closureless is None:
            return unpack_result(self.function.out_struct, nothing_given)
        args, kwargs = self.in_struct
        crossing = Crossing(eqx.filter_eval_shape, self.how.title, self.how.policy)
        return filter_eval_shape(crossing, self.how.closureless, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        """Whatever else Equinox's has: `consts`, `jaxpr`."""
        if name == "function":  # while this is being made
            raise AttributeError(name)
        return getattr(self.function, name)

    def _fitted(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
        """Arguments packed like those that it was made with.

        Raises:
            SharingMismatchError: if they lack a tie, or differ in shape or static values.
        """
        how = self.how
        call = pack_call(args, kwargs, (), how.policy.rules, Names(self))
        given = Given(call.args, call.kwargs)
        if jtu.tree_structure(given) == how.treedef:
            return given
        words = Words(how.title, "in the example arguments", "in those of the call")
        like = how.treedef.unflatten([0] * how.treedef.num_leaves)
        if not require_same_containers(like, given, "given", words):
            return given  # Equinox says best what is wrong
        before, after = Graph.of(like, "given"), Graph.of(given, "given")
        return packed_as(given, like, leaves_like(before, after, joined(before, after, words, exact=True)))


def filter_closure_convert(
    crossing: Crossing, fn: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] = NO_KEYWORDS
) -> Any:
    """`equinox.filter_closure_convert`."""
    if not callable(fn):
        return crossing.transform(fn, *args, **kwargs)  # says best what is wrong
    packed, named = crossing.enter_call(fn, args, kwargs)
    is_closureless = isinstance(fn, types.FunctionType) and fn.__closure__ is None
    if is_closureless and not crossing.call.modules:
        return crossing.transform(fn, *args, **kwargs)
    inner = _handed_on if is_closureless else crossing.function(fn, _whole, caches_traces=False)
    how = How(crossing.title, crossing.policy, jtu.tree_structure(Given(packed, named)), fn if is_closureless else None)
    return Converted(crossing.apply(inner, *packed, **named), how)


def _handed_on(*args: Any, **kwargs: Any) -> None:
    """Called by Equinox after it has checked the arguments."""


def _whole(inside: Inside, *args: Any, **kwargs: Any) -> Any:
    return inside.pack(inside.call(*args, named=kwargs))
