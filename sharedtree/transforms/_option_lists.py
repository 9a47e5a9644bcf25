"""Names of transforms in messages, and the options that `help` lists for a transform with identities preserved.

    help(sharedtree.jit)     (function=None, /, *, in_shardings=…, static_argnums=…, …, policy=None, in_place=None)

The first parameter, `function`, is added by the package. The parameters in the middle are those of `jax.jit`. The last
two are `ADDED_OPTIONS`, options that the package adds to every transform.
"""

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

ADDED_OPTIONS = ("policy", "in_place")
"""The options that each transform with identities preserved has in addition to its own."""


def lists_options_of(transform: Callable[..., Any], *ours: str) -> Callable[[C], C]:
    """Returns a decorator for a function with `**options`, so that `help` lists the options by name.

    It sets the function's signature, and returns the function itself.

    Args:
        transform: the transform that gets the options. It has one parameter before them.
        ours: names of further options, which the function takes for itself.
    """

    def listed(function: C) -> C:
        first = next(iter(inspect.signature(function).parameters.values())).replace(annotation=inspect.Parameter.empty)
        # An assignment to `function.__signature__` is an error for pyright.
        vars(function)["__signature__"] = signature_with(transform, first, ours)
        return function

    return listed


def signature_with(transform: Callable[..., Any], first: inspect.Parameter, ours: Sequence[str]) -> inspect.Signature:
    """Makes the signature for `help`: a first parameter, the options of a transform, and ours.

    Args:
        transform: the vanilla transform. Its first parameter is left out.
        first: stands in its place.
        ours: names of further options. If the transform has one of them too, it is listed once.
    """
    _, *options = inspect.signature(transform).parameters.values()
    # A default that is a bare `object()` only marks that the option is missing. It would print as an address.
    options = [p.replace(default=...) if type(p.default) is object else p for p in options]
    var_keywords = [p for p in options if p.kind is p.VAR_KEYWORD]
    names = {p.name for p in options}
    missing = [name for name in ours if name not in names]
    added = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in missing]
    # `**kwargs` has to be the last.
    return inspect.Signature([first, *[p for p in options if p not in var_keywords], *added, *var_keywords])


def title_of(transform: Any) -> str:
    """Returns the name of a transform in errors: `jax.lax.scan`, `my_transform`."""
    public = public_name(transform)
    return public or name_of(transform, transform, "__qualname__")


def public_name(transform: Any) -> str | None:
    """Returns the public name of a transform of JAX or Equinox: `jax.lax.scan`. None for other functions.

    The name in the definition of the transform may be another one.
    """
    modules = (jax, jax.lax, jax.debug, jax.custom_batching, jax.experimental, jax.export, eqx, equinox.internal)
    # Most transforms have one name in both. Looking it up takes a thousandth of the time of the search below.
    defined_name = name_of(transform, "")
    for module in modules:
        if defined_name and not defined_name.startswith("_") and vars(module).get(defined_name) is transform:
            return f"{module.__name__}.{defined_name}"
    for module in modules:
        # A copy, since another thread may import something meanwhile.
        for name, value in list(vars(module).items()):
            if value is transform and not name.startswith("_"):
                return f"{module.__name__}.{name}"
    return None
