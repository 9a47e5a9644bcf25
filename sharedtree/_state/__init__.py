"""Models as plain nested data, for people who bring their own storage.

Named with an underscore, for `sharedtree.state` is the function.
"""

from ._loading_state import load_state as load_state
from ._misfits import StateReport as StateReport
from ._registered_state import register_state as register_state
from ._taking import state as state
