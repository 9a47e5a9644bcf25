"""Shows treex and treeo views of JAX, NumPy and Flax, in which dropped names are there again.

The import statement of a module calls `__import__` in the module's builtins. The modules of treex and treeo get
builtins with another `__import__`. It returns *views*: objects that pass every look-up on to the real module, except
for names that the real module has dropped. JAX, NumPy and Flax themselves are not changed, so no other code sees a
difference:

    in treex    jax.tree_map → LibraryView("jax").tree_map → a replacement     jax.jit → the real one
    elsewhere   jax.tree_map → AttributeError, as without sharedtree

A function looks up the global names of its module when it is called. So treex gets views in every call and thread.
"""

import builtins
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ._linen import frozen_twin, gru_cell, with_frozen_variables
from ._names_jax_dropped import ROWS, find_stand_in

# Module and name → the row of a dropped name.
_ROW_OF = {(row.module, row.name): row for row in ROWS}
# Modules in which treex gets something else than other code.
_CHANGED_MODULES = frozenset(row.module for row in ROWS) | {"flax.linen.stochastic"}
# These modules and the packages around them, since `flax.linen` must lead to the view of `flax.linen.linear`.
_VIEWED_MODULES = frozenset(name[:end] for name in _CHANGED_MODULES for end, c in enumerate(name + ".") if c == ".")

OTHERS: dict[tuple[str, str], Callable[[], Any]] = {("flax.linen.recurrent", "GRUCell"): gru_cell}
"""Module and name → function that makes the object treex gets. The libraries still have these names, but changed."""


class LibraryView(types.ModuleType):
    """View of a module. If the libraries have dropped the module itself, only its replaced names are there."""

    def __getattr__(self, name: str) -> Any:
        """Looks up a name of the module.

        Raises:
            AttributeError: if neither the module nor the table of dropped names has it.
        """
        if (self.__name__, name) in OTHERS:
            return OTHERS[self.__name__, name]()
        try:
            value = getattr(sys.modules.get(self.__name__), name)
        except AttributeError:
            if (self.__name__, name) in _ROW_OF:
                return find_stand_in(_ROW_OF[self.__name__, name])
            # A submodule that was dropped, too.
            submodule = f"{self.__name__}.{name}"
            if submodule in _VIEWED_MODULES:
                return _views[submodule]
            raise
        if isinstance(value, types.ModuleType):
            return _views.get(value.__name__, value)
        # The next look-up finds the entry in `__dict__` and does not come here.
        if _is_layer(value):
            value = self.__dict__[name] = with_frozen_variables(value)
        return value


def _is_layer(value: Any) -> bool:
    """Returns True for a class of Linen modules, but not for their base class."""
    base = getattr(sys.modules.get("flax.linen"), "Module", None)
    return base is not None and isinstance(value, type) and issubclass(value, base) and value is not base


_views = {name: LibraryView(name) for name in _VIEWED_MODULES}


def _import(
    name: str,
    globals: Mapping[str, Any] | None = None,  # noqa: A002 -- the names of `builtins.__import__`
    locals: Mapping[str, Any] | None = None,  # noqa: A002
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> Any:
    """Imports as `builtins.__import__` does, but returns views of JAX, NumPy and Flax.

    Args:
        name: name in the import statement.
        globals: global names of the importing module.
        locals: local names there. Python does not use them.
        fromlist: names after `import` in `from name import ...`. Empty for `import name`.
        level: number of leading dots. Above 0, the imported module belongs to treex or treeo.
    """
    try:
        real = builtins.__import__(name, globals, locals, fromlist or (), level)
    except ModuleNotFoundError as error:
        # The module has been dropped, and there is a view that has its names.
        if level or error.name != name or name not in _VIEWED_MODULES:
            raise
        real = None
    if level:
        return real
    if name in _VIEWS_FOR_FLAX_MODULE and (globals or {}).get("__name__") == "treex.nn.flax_module":
        return _VIEWS_FOR_FLAX_MODULE[name]
    # `import a.b` returns `a`, and `from a.b import c` returns `a.b`.
    return _views.get(name if fromlist else name.partition(".")[0], real)


class _TreeoOfFlaxModule(LibraryView):
    """View of treeo for `tx.FlaxModule`, a class that puts a Linen module into a `Hashable`. Here the module is
    replaced.

    `tx.FlaxModule` uses `Hashable` for nothing else.
    """

    class Hashable:
        """Stands for `treeo.Hashable`. Making an instance makes a real one, of the module with frozen variables."""

        def __class_getitem__(cls, item: Any) -> Any:
            return sys.modules["treeo"].Hashable[item]

        def __new__(cls, module: Any) -> Any:
            return sys.modules["treeo"].Hashable(frozen_twin(module))


class _TypingOfFlaxModule(LibraryView):
    """View of `typing` for `tx.FlaxModule`: its `cast` copies the variables before their parameters are removed.

    `tx.FlaxModule` uses `cast` for nothing else. The variables were a copy once, made from a frozen dict. Today they
    are the user's own dict, which would lose its parameters. So `cast` makes a copy.
    """

    def cast(self, typ: Any, val: Any) -> Any:
        return dict(val)


# Views for the module `treex.nn.flax_module` only.
_VIEWS_FOR_FLAX_MODULE = {"treeo": _TreeoOfFlaxModule("treeo"), "typing": _TypingOfFlaxModule("typing")}


BUILTINS = {**vars(builtins), "__import__": _import}
"""The builtins of the modules of treex and treeo."""
