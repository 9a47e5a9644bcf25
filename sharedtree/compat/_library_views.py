"""What treex and treeo see in place of JAX, NumPy and Flax, and the import statement that shows it to them.

A module's code takes `import` from the `__import__` in its builtins. The modules of treex and treeo get builtins of
their own, with an `__import__` that returns *views*: objects that pass every look-up on to the real module, but for
names that it no longer has. Nothing in JAX, NumPy or Flax is changed, so nobody else sees a difference:

    in treex    jax.tree_map → View("jax").tree_map → given back        jax.jit → the real one
    elsewhere   jax.tree_map → AttributeError, as ever

A function looks its module's names up when it is called, so this holds for all that treex ever asks for, in any thread.
"""

import builtins
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ._linen import frozen_twin, gru_cell, with_frozen_variables
from ._names_jax_dropped import ROWS, find

_BY_PLACE = {(row.module, row.name): row for row in ROWS}
_DIFFERENT = frozenset(row.module for row in ROWS) | {"flax.linen.stochastic"}
# With the packages around them, which must lead to their views.
_SEEN = frozenset(name[:end] for name in _DIFFERENT for end, c in enumerate(name + ".") if c == ".")

OTHERS: dict[tuple[str, str], Callable[[], Any]] = {("flax.linen.recurrent", "GRUCell"): gru_cell}
"""Names that the libraries still have, but for something else, and what makes what treex gets."""


class View(types.ModuleType):
    """A module as treex sees it; of a module that is gone, what is given back of it."""

    def __getattr__(self, name: str) -> Any:
        if (self.__name__, name) in OTHERS:
            return OTHERS[self.__name__, name]()
        try:
            value = getattr(sys.modules.get(self.__name__), name)
        except AttributeError:
            if (self.__name__, name) in _BY_PLACE:
                return find(_BY_PLACE[self.__name__, name])
            place = f"{self.__name__}.{name}"
            if place in _SEEN:
                return _views[place]
            raise
        if isinstance(value, types.ModuleType):
            return _views.get(value.__name__, value)
        if _is_layer(value):
            value = self.__dict__[name] = with_frozen_variables(value)
        return value


def _is_layer(value: Any) -> bool:
    base = getattr(sys.modules.get("flax.linen"), "Module", None)
    return base is not None and isinstance(value, type) and issubclass(value, base) and value is not base


_views = {name: View(name) for name in _SEEN}


def _import(
    name: str,
    globals: Mapping[str, Any] | None = None,  # noqa: A002 -- the names of `builtins.__import__`
    locals: Mapping[str, Any] | None = None,  # noqa: A002
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> Any:
    """`builtins.__import__`, with views of JAX, NumPy and Flax."""
    try:
        real = builtins.__import__(name, globals, locals, fromlist or (), level)
    except ModuleNotFoundError as error:
        if level or error.name != name or name not in _SEEN:
            raise
        real = None
    if level:
        return real
    if name in _SEEN_BY_FLAX_MODULE and (globals or {}).get("__name__") == "treex.nn.flax_module":
        return _SEEN_BY_FLAX_MODULE[name]
    return _views.get(name if fromlist else name.partition(".")[0], real)


class _TreeoOfFlaxModule(View):
    """treeo as `tx.FlaxModule` sees it, which makes a `Hashable` of nothing but the Linen module that it is given."""

    class Hashable:
        def __class_getitem__(cls, item: Any) -> Any:
            return sys.modules["treeo"].Hashable[item]

        def __new__(cls, module: Any) -> Any:
            return sys.modules["treeo"].Hashable(frozen_twin(module))


class _TypingOfFlaxModule(View):
    """typing as `tx.FlaxModule` sees it, which casts nothing but the variables that it is about to take apart.

    They were a frozen dict, of which it had made a copy. Today they are the dict that the user passed, which would be
    left without parameters.
    """

    def cast(self, typ: Any, val: Any) -> Any:
        return dict(val)


_SEEN_BY_FLAX_MODULE = {"treeo": _TreeoOfFlaxModule("treeo"), "typing": _TypingOfFlaxModule("typing")}


BUILTINS = {**vars(builtins), "__import__": _import}
"""The builtins of the modules of treex and treeo."""
