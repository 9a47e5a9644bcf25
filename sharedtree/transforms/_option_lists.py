"""What a transform is called in messages, and the options that `help` lists of one with identities preserved."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import equinox as eqx
import equinox.internal
import jax
import jax.custom_batching
import jax.experimental

from ..libraries._equinox import name_of

C = TypeVar("C", bound=Callable[..., Any])

OURS = ("policy", "in_place")
"""The options that each transform with identities preserved has beside its own."""


def signature_with(transform: Callable[..., Any], first: inspect.Parameter, ours: Sequence[str]) -> inspect.Signature:
    """What `help` shows: a first parameter, those that the vanilla transform has after its own, and our options."""
    _, *others = inspect.signature(transform).parameters.values()
    # Some defaults only say that nothing was given, and print as an address.
    others = [each.replace(default=...) if type(each.default) is object else each for each in others]
    rest = [each for each in others if each.kind is each.VAR_KEYWORD]
    known = {each.name for each in others}
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in ours if name not in known
    ]
    return inspect.Signature([first, *[each for each in others if each not in rest], *added, *rest])


def lists_options_of(transform: Callable[..., Any], *ours: str) -> Callable[[C], C]:
    """A decorator for what hands its `**options` on: `help` lists them by their names.

    Args:
        transform: to which they are handed on. It has one parameter before those that both have.
        ours: further ones, by name.
    """

    def listed(function: C) -> C:
        first = next(iter(inspect.signature(function).parameters.values())).replace(annotation=inspect.Parameter.empty)
        # pyright takes a function for one without attributes of its own.
        vars(function)["__signature__"] = signature_with(transform, first, ours)
        return function

    return listed


def title_of(transform: Any) -> str:
    """What a transform is called in errors: `jax.lax.scan`, `my_transform`."""
    public = public_name(transform)
    return public or name_of(transform, transform, "__qualname__")


def public_name(transform: Any) -> str | None:
    """Returns the name under which JAX or Equinox offers a transform, whatever it is called where it is defined."""
    modules = (jax, jax.lax, jax.debug, jax.custom_batching, jax.experimental, jax.export, eqx, equinox.internal)
    # Most are offered by the name that they have, and a look into each namespace takes a thousandth of a search.
    own_name = name_of(transform, "")
    for module in modules:
        if own_name and not own_name.startswith("_") and vars(module).get(own_name) is transform:
            return f"{module.__name__}.{own_name}"
    for module in modules:
        for name, value in list(vars(module).items()):  # another thread may import
            if value is transform and not name.startswith("_"):
                return f"{module.__name__}.{name}"
    return None
