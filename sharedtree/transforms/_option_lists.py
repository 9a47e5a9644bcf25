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


def lists_options_of(transform: Callable[..., Any], *added: str) -> Callable[[C], C]:
    """Returns a decorator for a function with the parameters (first, **options). `help` then lists the options by name.

    The decorator sets the function's signature, and returns the function itself.

    Args:
        transform: the transform that gets the options. It has one parameter before its options.
        added: names of further options, which the function takes for itself.
    """

    def set_signature(function: C) -> C:
        """Sets the signature of a function, and returns the function itself."""
        first = next(iter(inspect.signature(function).parameters.values())).replace(annotation=inspect.Parameter.empty)
        # An assignment to `function.__signature__` is an error for pyright.
        vars(function)["__signature__"] = signature_with(transform, first, added)
        return function

    return set_signature


def signature_with(transform: Callable[..., Any], first: inspect.Parameter, added: Sequence[str]) -> inspect.Signature:
    """Makes the signature for `help`: a first parameter, the options of a transform, and added options.

    Args:
        transform: the vanilla transform (JAX's or Equinox's own). Its first parameter is left out.
        first: the parameter in place of the first one.
        added: names of further options, with the default None. A name that the transform has, too, is listed once.
    """
    _, *options = inspect.signature(transform).parameters.values()
    # A default that is a bare `object()` only marks that the option is missing. It would print as an address, so `...`
    # takes its place.
    options = [p.replace(default=...) if type(p.default) is object else p for p in options]
    var_keywords = [p for p in options if p.kind is p.VAR_KEYWORD]
    names = {p.name for p in options}
    names_to_add = [name for name in added if name not in names]
    added_options = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in names_to_add]
    # `**kwargs` has to be the last.
    return inspect.Signature([first, *[p for p in options if p not in var_keywords], *added_options, *var_keywords])


def title_of(transform: Any) -> str:
    """Returns the name of a transform in errors: "jax.lax.scan" or, for a transform of a user, "my_transform"."""
    public = public_name(transform)
    return public or name_of(transform, transform, "__qualname__")


def public_name(transform: Any) -> str | None:
    """Returns the public name of a transform of JAX or Equinox, such as "jax.lax.scan". None for other functions.

    The `__name__` of a transform may differ from its public name.
    """
    modules = (jax, jax.lax, jax.debug, jax.custom_batching, jax.experimental, jax.export, eqx, equinox.internal)
    # Most transforms are public under their `__name__`. To look it up takes a thousandth of the time of the search
    # below.
    defined_name = name_of(transform, "")
    for module in modules:
        if defined_name and not defined_name.startswith("_") and vars(module).get(defined_name) is transform:
            return f"{module.__name__}.{defined_name}"
    for module in modules:
        # A copy, since another thread may import something during the loop, which would change the dictionary.
        for name, value in list(vars(module).items()):
            if value is transform and not name.startswith("_"):
                return f"{module.__name__}.{name}"
    return None
