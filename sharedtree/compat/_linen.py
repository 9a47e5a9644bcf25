"""Flax's Linen modules as treex knew them: `init` and `apply` return variables in frozen dicts.

Flax did until 0.7.1, and treex calls `.unfreeze()` on what it gets. Flax has a setting that brings frozen dicts back,
but one for the whole process. So treex gets subclasses of the same names and fields, and a module that a user brings to
`tx.FlaxModule` is made one of such a subclass, with the same fields.
"""

import dataclasses
import functools
import importlib
import types
from typing import Any

import jax

from ..core._locks import Lock


def _flax(name: str) -> Any:
    """A module of Flax, which only those who use treex have."""
    return importlib.import_module(f"flax.{name}")


_making = Lock()  # Python shows a subclass before Flax has made it a module


def with_frozen_variables(cls: Any) -> Any:
    """The subclass of a class of Linen modules whose `init` and `apply` return frozen dicts.

    Raises:
        TypeError: if the class cannot have subclasses, or asks something of them.
    """
    with _making:
        # Python knows the subclasses of a class weakly, so a class that nobody uses any more is not kept by this.
        for subclass in cls.__subclasses__():
            if subclass.__dict__.get("_has_frozen_variables"):
                return subclass
        try:
            return types.new_class(cls.__name__, (cls,), exec_body=lambda names: names.update(_frozen(cls)))
        except Exception as error:
            raise TypeError(
                f"`{cls.__qualname__}` cannot be used in treex, which takes a subclass of it that returns frozen "
                f"dicts. Making one raised {type(error).__name__}: {error}"
            ) from error


def _frozen(cls: Any) -> dict[str, Any]:
    """The attributes of the subclass."""
    linen, freeze = _flax("linen"), _flax("core").freeze

    def init(self: Any, *args: Any, **kwargs: Any) -> Any:
        return freeze(cls.init(self, *args, **kwargs))

    def init_with_output(self: Any, *args: Any, **kwargs: Any) -> Any:
        output, variables = cls.init_with_output(self, *args, **kwargs)
        return output, freeze(variables)

    def apply(self: Any, *args: Any, mutable: Any = False, **kwargs: Any) -> Any:
        result = cls.apply(self, *args, mutable=mutable, **kwargs)
        if mutable is False and not kwargs.get("capture_intermediates"):
            return result
        output, variables = result
        return output, freeze(variables)

    def reduce(self: Any) -> Any:
        # By its own name the class would not be found.
        return frozen_twin, (cls(**_fields_of(self), parent=None),)

    methods = {"init": init, "init_with_output": init_with_output, "apply": apply, "__reduce__": reduce}
    return {
        "_has_frozen_variables": True,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        **{name: linen.nowrap(method) for name, method in methods.items()},
    }


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

    GRUCell.__module__, GRUCell.__qualname__ = linen.GRUCell.__module__, linen.GRUCell.__qualname__
    return GRUCell


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
    return with_frozen_variables(type(module))(**_fields_of(module), parent=None)


def _fields_of(module: Any) -> dict[str, Any]:
    return {f.name: getattr(module, f.name) for f in dataclasses.fields(module) if f.init and f.name != "parent"}
