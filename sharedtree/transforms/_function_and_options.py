"""How a transform is applied: which argument is the function, which are options, and which would be operands.

A module under one of Equinox's transforms is a module again: `equinox.filter_vmap(layer)` is a pytree whose leaves are
those of the layer, so that a model which holds it is trained whole. With identities preserved it is one, too: it holds
the layer and what is to be done with it, and does that anew whenever it is called.
"""

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import equinox as eqx
import equinox.internal
import jax
import jax.custom_batching
import jax.experimental

from ..core._jax_internals import api_boundary
from ..core._static_values import Static
from ..libraries._equinox import name_of
from ..ties._policy_and_context import PolicyOption
from ._option_lists import title_of


def apply_options(
    transform: Callable[..., Any], positional: Sequence[Any], options: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Sorts what a transform was called with, by its signature.

    Args:
        transform: the vanilla transform.
        positional: the function, and options by position, as in `jax.vmap(f, 0)`.
        options: by name; the function may be among them, as in `jax.grad(fun=f)`.

    Returns:
        The function, or None if there is none yet, and all options by name.

    Raises:
        TypeError: if the transform takes operands beside the function, for which there is no adapter; or if it would
            not accept what it was called with.
    """
    try:
        signature = inspect.signature(transform)
    except (ValueError, TypeError):
        if len(positional) > 1:
            _refuse_operands(transform)
        return (positional[0] if positional else None), options
    first, *others = signature.parameters.values() or (None,)
    if first is None or first.kind not in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD):
        if len(positional) > 1:
            _refuse_operands(transform)
        return (positional[0] if positional else None), options
    if first.name in options and first.kind is first.POSITIONAL_OR_KEYWORD and not positional:
        positional, options = [options[first.name]], {k: v for k, v in options.items() if k != first.name}
    if not positional:
        return None, options
    named = [each for each in others if each.kind is each.POSITIONAL_OR_KEYWORD]
    if any(each.default is each.empty and each.name not in options for each in named) or _takes_any(transform, others):
        _refuse_operands(transform)
    if len(positional) > 1:
        signature.bind(*positional, **options)
    given = {each.name: value for each, value in zip(named, positional[1:], strict=False)}
    return positional[0], {**given, **options}


def _takes_any(transform: Callable[..., Any], parameters: Sequence[inspect.Parameter]) -> bool:
    """Whether a transform of JAX or Equinox takes operands without names; a user's may hand them on as options."""
    package = str(getattr(transform, "__module__", "")).partition(".")[0]
    return package in ("jax", "equinox") and any(each.kind is each.VAR_POSITIONAL for each in parameters)


def in_code(title: str, options: str, function: str = "") -> str:
    """How to write a transform with these options, with the ready-made function where there is one.

    Args:
        title: what errors call the transform.
        options: as code.
        function: what it is applied to, where it is known to take a function alone.
    """
    package, _, name = title.rpartition(".")
    # The door offers what is ready made, and imports this file.
    offered = sys.modules[__name__.rpartition(".")[0]]
    ready = getattr(offered, name, None) if package in ("jax", "jax.lax", "equinox") else None
    if ready is None:
        own = f", {options}" if options else ""
        title = title if all(part.isidentifier() for part in title.split(".")) else "transform"
        return f"sharedtree.preserve_identities({title}{own}){function and f'({function})'}"
    first, *others = inspect.signature(ready).parameters.values()
    needs_options = any(each.kind is each.KEYWORD_ONLY and each.default is each.empty for each in others)
    if first.default is None and not needs_options:  # without a function it returns a decorator
        return f"sharedtree.{name}({function or 'f'}{options and f', {options}'})"
    return f"functools.partial(sharedtree.{name}{options and f', {options}'})"


def transform_named(name: str) -> Any:
    """The inverse of `public_name`."""
    module, _, attribute = name.rpartition(".")
    return getattr(sys.modules[module], attribute)


def _refuse_operands(transform: Callable[..., Any]) -> NoReturn:
    raise TypeError(
        f"`{title_of(transform)}` takes operands beside the function, and no adapter says how it treats them. Give it "
        "`Dag`s, which every transform takes as they are, as in\n"
        "    jax.vjp(lambda dag: f(dag.tree), sharedtree.Dag(model))\n"
        "or register an adapter: sharedtree.register_transform(transform, adapter, takes_operands=True)"
    )


class How:
    """A transform and its options, compared strictly: part of the structure of every module that holds it."""

    __slots__ = ("_key", "adapter", "options", "policy", "transform")

    def __init__(
        self, adapter: Callable[..., Any], transform: Callable[..., Any], policy: PolicyOption, options: dict[str, Any]
    ) -> None:
        self.adapter = adapter
        self.transform = transform
        self.policy = policy
        self.options = options
        self._key = Static((adapter, transform, policy, tuple(sorted(options.items(), key=lambda item: item[0]))))

    def applied_to(self, function: Callable[..., Any]) -> Any:
        """The function under the transform."""
        return self.adapter(self.transform, function, self.policy, self.options)

    def __eq__(self, other: object) -> bool:
        return type(other) is How and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return name_of(self.transform, self.transform)


def is_of_equinox(transform: Callable[..., Any]) -> bool:
    """Whether a transform is one of those that make a module of a module, and equal ones of equal functions."""
    return str(getattr(transform, "__module__", "")).partition(".")[0] == "equinox"


class TransformedModule(eqx.Module):
    """A module under a transform of Equinox's, with identities preserved. Its leaves are those of the module."""

    function: Any
    how: How = eqx.field(static=True)

    @property
    def __wrapped__(self) -> Any:
        return self.function

    def wrapper(self) -> Any:
        """The module under the transform, as a wrapped function."""
        return self.how.applied_to(self.function)

    @api_boundary
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.wrapper()(*args, **kwargs)

    @api_boundary
    def lower(self, /, *args: Any, **kwargs: Any) -> Any:
        """As `equinox.filter_jit(f).lower`; other transforms have none."""
        return self.wrapper().lower(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else jax.tree_util.Partial(self, instance)
