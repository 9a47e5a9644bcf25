"""A module under one of Equinox's transforms is a module again.

`equinox.filter_vmap(layer)` is a pytree whose leaves are those of the layer, so that a model which holds it is trained
whole. With identities preserved it is one, too: it holds the layer and what is to be done with it, and does that anew
whenever it is called.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax

from ..core._jax_internals import api_boundary
from ..core._static_values import Static
from ..libraries._equinox import name_of
from ..ties._context import PolicyOption


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
