"""Makes Linen modules for treex, whose `init` and `apply` return variables in frozen dicts.

Flax returned frozen dicts until 0.7.1, and treex calls `.unfreeze()` on them. Flax has a setting for frozen dicts, but
it holds for the whole process. So treex gets subclasses with the names and fields of Flax's classes. If a user passes a
Linen module to `tx.FlaxModule`, it is replaced by an instance of such a subclass with the same fields.
"""

import dataclasses
import functools
import importlib
import types
from typing import Any

import jax

from ..core._locks import Lock


def _flax(name: str) -> Any:
    """Imports a module of Flax and returns it. Flax is installed only where treex is used."""
    return importlib.import_module(f"flax.{name}")


# One thread at a time makes a subclass, because `__subclasses__()` has a class before Flax has made it a module.
_lock = Lock()


def with_frozen_variables(cls: Any) -> Any:
    """Returns the subclass of a Linen module's class whose `init` and `apply` return frozen dicts.

    The subclass is made at the first call.

    Raises:
        TypeError: if the class cannot have subclasses, or requires something of them.
    """
    with _lock:
        # A class refers to its subclasses weakly. So unlike a dict, this keeps no class alive.
        for subclass in cls.__subclasses__():
            if subclass.__dict__.get("_has_frozen_variables"):
                return subclass
        try:
            # The attributes must be there when Flax makes the class a module, so they are in the body of the class.
            return types.new_class(cls.__name__, (cls,), exec_body=lambda names: names.update(_attributes(cls)))
        except Exception as error:
            raise TypeError(
                f"`{cls.__qualname__}` cannot be used in treex, which takes a subclass of it that returns frozen "
                f"dicts. Making one raised {type(error).__name__}: {error}"
            ) from error


def _attributes(cls: Any) -> dict[str, Any]:
    """Returns the attributes of the subclass of a class: methods that freeze the variables they return."""
    linen, freeze = _flax("linen"), _flax("core").freeze

    def init(self: Any, *args: Any, **kwargs: Any) -> Any:
        return freeze(cls.init(self, *args, **kwargs))

    def init_with_output(self: Any, *args: Any, **kwargs: Any) -> Any:
        output, variables = cls.init_with_output(self, *args, **kwargs)
        return output, freeze(variables)

    def apply(self: Any, *args: Any, mutable: Any = False, **kwargs: Any) -> Any:
        result = cls.apply(self, *args, mutable=mutable, **kwargs)
        # Only with these options does `apply` return variables, too.
        if mutable is False and not kwargs.get("capture_intermediates"):
            return result
        output, variables = result
        return output, freeze(variables)

    def reduce(self: Any) -> Any:
        # The subclass has the name of Flax's class, so pickle would find Flax's. The pickle holds an instance of that
        # class instead, from which `frozen_twin` makes one of the subclass.
        return frozen_twin, (cls(**_fields_of(self), parent=None),)

    methods = {"init": init, "init_with_output": init_with_output, "apply": apply, "__reduce__": reduce}
    # `nowrap` keeps Flax from wrapping the methods, which would give them a scope for parameters.
    return {
        "_has_frozen_variables": True,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        **{name: linen.nowrap(method) for name, method in methods.items()},
    }


@functools.cache
def gru_cell() -> Any:
    """Returns a class with the interface of `GRUCell` before Flax 0.7: the carry gives the number of features.

    Its layers and the names and shapes of its parameters are those of today's `flax.linen.GRUCell`.
    """
    linen = _flax("linen")
    frozen = with_frozen_variables(linen.GRUCell)

    class GRUCell(frozen):
        # Today's Flax, too, takes the number from the carry. It reads this field only to make a first carry.
        features: int | None = None

        @staticmethod
        def initialize_carry(
            rng: Any, batch_dims: tuple[int, ...], size: int, init_fn: Any = jax.nn.initializers.zeros
        ) -> Any:
            return init_fn(rng, (*batch_dims, size))

    GRUCell.__module__, GRUCell.__qualname__ = linen.GRUCell.__module__, linen.GRUCell.__qualname__
    return GRUCell


def frozen_twin(module: Any) -> Any:
    """Returns a copy of a Linen module whose `init` and `apply` return frozen dicts.

    Raises:
        TypeError: if `module` is no Linen module.
    """
    if not isinstance(module, _flax("linen").Module):
        raise TypeError(
            f"`tx.FlaxModule` takes a module of `flax.linen`, not `{type(module).__qualname__}`.\n"
            "    tx.FlaxModule(flax.linen.Dense(features=3))"
        )
    return with_frozen_variables(type(module))(**_fields_of(module), parent=None)


def _fields_of(module: Any) -> dict[str, Any]:
    """Returns the fields of a Linen module, as arguments for its class. `parent` is not among them."""
    fields = [field for field in dataclasses.fields(module) if field.init and field.name != "parent"]
    return {field.name: getattr(module, field.name) for field in fields}
