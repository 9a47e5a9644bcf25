"""Models as plain nested data, for people who bring their own storage: `state` and `load_state`.

`state` converts a model to nested data. `load_state` makes a model of a model and nested data. Neither writes a file.
"""

from ._model_from_state import load_state as load_state
from ._state_forms import register_state as register_state
from ._state_misfits import StateReport as StateReport
from ._state_of_model import state as state

# Prints, pickles and documentation use the public name, `sharedtree.StateReport`.
StateReport.__module__ = __name__.partition(".")[0]
