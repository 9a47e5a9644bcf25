"""The one file that looks inside optax: it finds the masks and labels that a transformation was made with.

`optax.masked(tx, mask)` returns two functions that close over `mask`. A mask is a tree of the model's shape, with all
of its paths, or a function of such a tree; what optax gets from `sharedtree.optimizer` is a tree in which each
parameter stands once. So the masks have to be translated, and whether they agree at a tie can be seen nowhere else.

What is relied on: functions defined in optax hold masks and labels in free variables, and `inject_hyperparams` in
dictionaries, under the names below, and call what is callable with a tree. If a name vanishes, the masks under it reach
optax as they are: a function is called with the tree of single parameters, and a tree is refused by JAX where the model
shares a node, and is not checked at ties of arrays. A test tries every parameter of every transformation that is
called so.
"""

import copy
import functools
import types
from collections.abc import Callable
from typing import Any

from ..core._by_identity import IdentityDict

NAMES = frozenset(
    {
        "mask",
        "param_labels",
        "weight_dimension_numbers",
        # Arguments that optax hands on under one of the names above, which `inject_hyperparams` keeps as they are.
        "weight_decay_mask",
        "trust_ratio_mask",
        "freeze_mask",
        "muon_weight_dimension_numbers",
    }
)


def with_labels(tx: Any, translate: Callable[[Any, str], Any]) -> Any:
    """A transformation whose masks and labels are replaced; itself if it has none.

    Args:
        tx: a transformation; it is not changed.
        translate: (mask or labels, the name that optax has for them) → what is put in their place.

    Cost: the number of functions that make up the transformation.

    Limitations: a function that closes over itself goes on calling the original.
    """
    made: IdentityDict[Any] = IdentityDict()

    def replaced(obj: Any, name: str, *, is_optax: bool) -> Any:
        if is_optax and name in NAMES and obj is not None and not isinstance(obj, bool):
            return translate(obj, name)
        return visit(obj, is_optax=is_optax)

    def visit(obj: Any, *, is_optax: bool) -> Any:
        if obj not in made:
            made[obj] = obj  # where it contains itself
            made[obj] = changed(obj, is_optax=is_optax)
        return made[obj]

    def changed(obj: Any, *, is_optax: bool) -> Any:
        if isinstance(obj, types.FunctionType):
            return function(obj)
        if isinstance(obj, types.MethodType):
            owner = visit(obj.__self__, is_optax=is_optax)
            return obj if owner is obj.__self__ else types.MethodType(obj.__func__, owner)
        if isinstance(obj, functools.partial):
            parts = visit(obj.func, is_optax=is_optax), obj.args, obj.keywords
            new = (
                [visit(arg, is_optax=is_optax) for arg in obj.args],
                each(obj.keywords, is_optax=_is_of_optax(obj.func)),
            )
            is_same = parts[0] is obj.func and _are_same(new[0], obj.args) and new[1] is obj.keywords
            return obj if is_same else functools.partial(parts[0], *new[0], **new[1])
        if not is_optax and not _is_of_optax(type(obj)):
            return obj  # containers of a user's functions may hold anything, and a lot of it
        if isinstance(obj, tuple | list):
            items = [visit(item, is_optax=True) for item in obj]
            if _are_same(items, obj):
                return obj
            return type(obj)(*items) if hasattr(obj, "_fields") else type(obj)(items)
        if type(obj) is dict:
            return each(obj, is_optax=True)
        if _is_of_optax(type(obj)) and hasattr(obj, "__dict__"):
            attributes = each(vars(obj), is_optax=True)
            if attributes is vars(obj):
                return obj
            twin = copy.copy(obj)
            vars(twin).update(attributes)
            return twin
        return obj

    def each(mapping: dict[Any, Any], *, is_optax: bool) -> dict[Any, Any]:
        new = {name: replaced(item, name, is_optax=is_optax) for name, item in mapping.items()}
        return mapping if _are_same(new.values(), mapping.values()) else new

    def function(f: Any) -> Any:
        cells = f.__closure__ or ()
        is_optax = _is_of_optax(f)
        new: list[types.CellType] = []
        for name, cell in zip(f.__code__.co_freevars, cells, strict=True):
            try:
                content = cell.cell_contents
            except ValueError:  # not assigned yet
                new.append(cell)
                continue
            other = replaced(content, name, is_optax=is_optax)
            new.append(cell if other is content else types.CellType(other))
        if _are_same(new, cells):
            return f
        twin = types.FunctionType(f.__code__, f.__globals__, f.__name__, f.__defaults__, tuple(new))
        twin.__kwdefaults__ = f.__kwdefaults__
        return functools.update_wrapper(twin, f)

    # The two functions of a transformation are all that counts of it, whoever made the tuple that holds them.
    init, update = visit(tx.init, is_optax=True), visit(tx.update, is_optax=True)
    return tx if init is tx.init and update is tx.update else tx._replace(init=init, update=update)


def has_labels(tx: Any) -> bool:
    """Whether there is anything to translate in a transformation."""
    return with_labels(tx, lambda *_: None) is not tx


def _is_of_optax(obj: Any) -> bool:
    return str(getattr(obj, "__module__", "")).partition(".")[0] == "optax"


def _are_same(new: Any, old: Any) -> bool:
    return all(a is b for a, b in zip(new, old, strict=True))
