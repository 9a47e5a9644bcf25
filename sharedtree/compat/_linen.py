"""Flax's Linen modules as treex knew them: `init` and `apply` return variables in frozen dicts.

Flax did until 0.7.1, and treex calls `.unfreeze()` on what it gets. Flax has a setting that brings frozen dicts back,
but one for the whole process. So treex gets subclasses of the same names and fields, and a module that a user brings to
`tx.FlaxModule` is made one of such a subclass, with the same fields.
"""

import dataclasses
import functools
import importlib
from typing import Any

import jax


def _flax(name: str) -> Any:
    """A module of Flax, which only those who use treex have."""
    return importlib.import_module(f"flax.{name}")


def with_frozen_variables(cls: Any) -> Any:
    """The subclass of a class of Linen modules whose `init` and `apply` return frozen dicts."""
    # Python knows the subclasses of a class weakly, so a class that nobody uses any more is not kept by this.
    for subclass in cls.__subclasses__():
        if subclass.__dict__.get("_has_frozen_variables"):
            return subclass
    linen, freeze = _flax("linen"), _flax("core").freeze

    class Frozen(cls):
        _has_frozen_variables = True

        @linen.nowrap
        def init(self, *args: Any, **kwargs: Any) -> Any:
            return freeze(super().init(*args, **kwargs))

        @linen.nowrap
        def init_with_output(self, *args: Any, **kwargs: Any) -> Any:
            output, variables = super().init_with_output(*args, **kwargs)
            return output, freeze(variables)

        @linen.nowrap
        def apply(self, *args: Any, mutable: Any = False, **kwargs: Any) -> Any:
            result = super().apply(*args, mutable=mutable, **kwargs)
            if mutable is False and not kwargs.get("capture_intermediates"):
                return result
            output, variables = result
            return output, freeze(variables)

    return _named_like(Frozen, cls)


@functools.cache
def gru_cell() -> Any:
    """`flax.linen.GRUCell` as it was before Flax 0.7: the carry says how many features there are.

    Its layers and the names and shapes of its parameters have not changed since.
    """
    linen = _flax("linen")
    frozen = with_frozen_variables(linen.GRUCell)

    class GRUCell(frozen):
        # Flax reads the number from the carry, and this field only to make one.
        features: int | None = None

        @staticmethod
        def initialize_carry(
            rng: Any, batch_dims: tuple[int, ...], size: int, init_fn: Any = jax.nn.initializers.zeros
        ) -> Any:
            return init_fn(rng, (*batch_dims, size))

    return _named_like(GRUCell, linen.GRUCell)


def _named_like(cls: Any, other: Any) -> Any:
    cls.__name__, cls.__qualname__, cls.__module__ = other.__name__, other.__qualname__, other.__module__
    return cls


def frozen_twin(module: Any) -> Any:
    """A Linen module with the fields of another, and frozen variables.

    Raises:
        TypeError: if it is none.
    """
    if not isinstance(module, _flax("linen").Module):
        raise TypeError(
            f"`tx.FlaxModule` takes a module of `flax.linen`, not `{type(module).__qualname__}`.\n"
            "    tx.FlaxModule(flax.linen.Dense(features=3))"
        )
    fields = {f.name: getattr(module, f.name) for f in dataclasses.fields(module) if f.init and f.name != "parent"}
    return with_frozen_variables(type(module))(**fields, parent=None)
