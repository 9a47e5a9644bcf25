"""What users of a library can do about what cannot be written, whose code is not theirs to change.

Who wrote a class can make it a dataclass, and who wrote a closure can make what it holds a field. Who only uses them
can save what the model has of its own, its arrays, and put that into a model that the library makes anew.
"""

import types
from collections.abc import Sequence
from typing import Any

from ..trust._allowed import LIBRARIES, NAMES_ONLY
from ..trust._classes import held
from ..trust._installed import is_in_site_packages
from ..trust._names import RefusalError, home_of, root_of

_TRAIN_STATE = (
    "The functions of a `TrainState` are made by the program. Save the rest, "
    '`sharedtree.save(path, {"step": state.step, "params": state.params, "opt_state": state.opt_state})`, and put it '
    "into a new state after loading: `state = state.replace(**sharedtree.load(path))`."
)
_PENZAI = (
    "It is a variable of Penzai, which is changed in place. Save frozen ones, "
    "`sharedtree.save(path, penzai.pz.unbind_params(model, freeze=True))`, and bind them again: "
    "`model, params = sharedtree.load(path, trusted=['penzai'])`, "
    "`model = penzai.pz.bind_variables(model, [each.unfreeze_as_copy() for each in params])`."
)


def fix_for_users(holders: Sequence[Any], obj: Any, error: RefusalError) -> str:
    """The fix of an error for an object, of which the holders, the root first, may be of another's library."""
    state = held("flax.training.train_state", "TrainState")
    if state is not None and any(isinstance(holder, state) for holder in holders):
        return _TRAIN_STATE
    variable = held("penzai.core.variables", "Parameter")
    if variable is not None and isinstance(obj, variable):
        return _PENZAI
    is_function = isinstance(obj, types.FunctionType)
    library = root_of(home_of(obj if is_function else type(obj)))
    # What is said of the classes of libraries that are known is said to their users.
    if not is_in_site_packages(library) or (library in LIBRARIES | NAMES_ONLY and not is_function):
        return error.fix
    return (
        f"It is made by `{library}`: leave it out, and make it anew after loading. Or save the arrays alone, "
        "`sharedtree.save(path, sharedtree.tree.leaves(model))`, and put them into a model that is made anew: "
        "`model = sharedtree.tree.unflatten(sharedtree.tree.structure(model), sharedtree.load(path))`."
    )
