"""Row of the table of libraries for optax: the classes of its states. Besides, its masks and labels.

Only this file looks inside optax.

*States.* The state of a transformation is a namedtuple of optax, such as `ScaleByAdamState`, or a tuple of such ones.
Whatever is below one is no parameter.

*Masks and labels.* `with_labels` replaces those that a transformation was made with. `optax.masked(tx, mask)` returns
two functions that close over `mask`. A mask is a tree of the model's shape, with all of its paths, or a function of
such a tree. But optax gets a tree in which each parameter stands once from `sharedtree.optimizer`. So masks have to be
translated, and this is the only place where we can check that a mask agrees at all paths of a tie. Labels
(`optax.multi_transform`) are translated in the same way.

We rely on two facts. Functions that are defined in optax hold masks and labels in free variables, and
`inject_hyperparams` in dictionaries, under the names in `NAMES`. They call a callable mask with a tree.

If optax renames such a variable, masks under the new name stay untranslated. Then a mask that is a function is called
with the tree in which each parameter stands once. For a mask that is a tree, JAX raises an error if the model shares a
node, and nobody checks it at ties of arrays. A test tries every parameter with such a name of every transformation.
"""

import copy
import functools
import types
from collections.abc import Callable
from typing import Any

from ..core._by_identity import IdentityDict
from ..core._node_types import Library, NamesInFiles, Role, is_namedtuple


def role_of(cls: Any) -> Role | None:
    """Returns "optimizer state" for the states of optax. None for other classes.

    `LookaheadParams` and other namedtuples of optax that hold parameters are no states.
    """
    is_state = is_namedtuple(cls) and _is_of_optax(cls) and _is_name_of_state(cls.__name__)
    return "optimizer state" if is_state else None


def role_in_files(name: str) -> Role | None:
    """Returns the same for a class by its name in a file: `optax:ScaleByAdamState`."""
    module, _, class_name = name.partition(":")
    is_state = module.partition(".")[0] == "optax" and _is_name_of_state(class_name)
    return "optimizer state" if is_state else None


def _is_name_of_state(name: str) -> bool:
    """Returns True for the names of state classes. All of optax 0.2.8 end in "State", except two."""
    return name.endswith("State") or name in ("ApplyEvery", "WeightDecaySchedule")


OPTAX = Library(
    "optax",
    role_of=role_of,
    role_in_files=role_in_files,
    # The states of optax are namedtuples. Its transformations hold functions that it makes on each call, and no name
    # leads to these.
    names=NamesInFiles("optax", kinds=("namedtuple",)),
)


# --- masks and labels -------------------------------------------------------------------------------------------------

NAMES = frozenset(
    {
        "mask",
        "param_labels",
        "weight_dimension_numbers",
        # Optax passes these arguments on under one of the names above. `inject_hyperparams` keeps their own names.
        "weight_decay_mask",
        "trust_ratio_mask",
        "freeze_mask",
        "muon_weight_dimension_numbers",
    }
)
"""Names of the free variables and dictionary keys under which optax holds masks and labels."""


def with_labels(tx: Any, translate: Callable[[Any, str], Any]) -> Any:
    """Returns a transformation with other masks and labels, or the same transformation if it has none.

    Objects that hold masks are copied with the new ones, and so are the objects that hold these. All others are kept.

    Args:
        tx: a transformation; it is not changed.
        translate: (mask or labels, their name in optax) → the new mask or labels.

    Cost: proportional to the number of functions in the transformation.

    Limitations: a function that closes over itself calls the original.
    """
    # Object → the object that replaces it, which may be itself.
    results: IdentityDict[Any] = IdentityDict()

    # In the functions below, `is_optax` is True for an object that a function or an object of optax holds. Only there
    # does a name from `NAMES` mean a mask.

    def replace_named(obj: Any, name: str, *, is_optax: bool) -> Any:
        """Translates the object under a name if it is a mask. Otherwise visits it."""
        # None and True are no trees: they mean no mask, or a mask for all.
        if is_optax and name in NAMES and obj is not None and not isinstance(obj, bool):
            return translate(obj, name)
        return visit(obj, is_optax=is_optax)

    def visit(obj: Any, *, is_optax: bool) -> Any:
        """Returns the replacement of an object, made once."""
        if obj not in results:
            # Where the object contains itself, the original stays.
            results[obj] = obj
            results[obj] = replace(obj, is_optax=is_optax)
        return results[obj]

    def replace(obj: Any, *, is_optax: bool) -> Any:
        """Returns a copy of an object with new masks in it, or the object itself if it holds none."""
        if isinstance(obj, types.FunctionType):
            return replace_function(obj)
        if isinstance(obj, types.MethodType):
            owner = visit(obj.__self__, is_optax=is_optax)
            return obj if owner is obj.__self__ else types.MethodType(obj.__func__, owner)
        if isinstance(obj, functools.partial):
            func = visit(obj.func, is_optax=is_optax)
            args = [visit(arg, is_optax=is_optax) for arg in obj.args]
            keywords = replace_values(obj.keywords, is_optax=_is_of_optax(obj.func))
            is_same = func is obj.func and _are_same(args, obj.args) and keywords is obj.keywords
            return obj if is_same else functools.partial(func, *args, **keywords)
        # The containers of a user's functions may hold anything, and a lot of it.
        if not is_optax and not _is_of_optax(type(obj)):
            return obj
        if isinstance(obj, tuple | list):
            items = [visit(item, is_optax=True) for item in obj]
            if _are_same(items, obj):
                return obj
            return type(obj)(*items) if hasattr(obj, "_fields") else type(obj)(items)
        if type(obj) is dict:
            return replace_values(obj, is_optax=True)
        if _is_of_optax(type(obj)) and hasattr(obj, "__dict__"):
            attributes = replace_values(vars(obj), is_optax=True)
            if attributes is vars(obj):
                return obj
            twin = copy.copy(obj)
            vars(twin).update(attributes)
            return twin
        return obj

    def replace_values(mapping: dict[Any, Any], *, is_optax: bool) -> dict[Any, Any]:
        """Returns a dictionary with replaced values, or the same one if none is replaced. Its keys are names."""
        new = {name: replace_named(item, name, is_optax=is_optax) for name, item in mapping.items()}
        return mapping if _are_same(new.values(), mapping.values()) else new

    def replace_function(f: Any) -> Any:
        """Returns a copy of a function with replaced free variables, or the function itself if none is replaced."""
        # A cell holds the value of a free variable.
        cells = f.__closure__ or ()
        is_optax = _is_of_optax(f)
        new_cells: list[types.CellType] = []
        for name, cell in zip(f.__code__.co_freevars, cells, strict=True):
            try:
                content = cell.cell_contents
            # The variable was not assigned yet.
            except ValueError:
                new_cells.append(cell)
                continue
            new_content = replace_named(content, name, is_optax=is_optax)
            new_cells.append(cell if new_content is content else types.CellType(new_content))
        if _are_same(new_cells, cells):
            return f
        twin = types.FunctionType(f.__code__, f.__globals__, f.__name__, f.__defaults__, tuple(new_cells))
        twin.__kwdefaults__ = f.__kwdefaults__
        return functools.update_wrapper(twin, f)

    # The tuple `tx` may be of a user's class, but its two functions count as held by optax.
    init, update = visit(tx.init, is_optax=True), visit(tx.update, is_optax=True)
    return tx if init is tx.init and update is tx.update else tx._replace(init=init, update=update)


def has_labels(tx: Any) -> bool:
    """Returns True if a transformation has masks or labels."""
    # Replaces each mask by None, and looks whether that makes another transformation.
    return with_labels(tx, lambda *_: None) is not tx


def _is_of_optax(obj: Any) -> bool:
    """Returns True for a function or a class defined in optax."""
    return str(getattr(obj, "__module__", "")).partition(".")[0] == "optax"


def _are_same(new: Any, old: Any) -> bool:
    """Returns True if two iterables of one length hold the same objects."""
    return all(a is b for a, b in zip(new, old, strict=True))
