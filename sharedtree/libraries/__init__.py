"""Support for the classes of other libraries: one file and one `Library` for each. Only `optim` uses `_optax`.

A `Library` answers questions about a class: how its instances are read, made, written back, trained and saved. None of
these files imports a library that the program has not imported, or a package of sharedtree other than `core`.
"""

from ..core._node_types import LIBRARIES
from ._dataclasses import DATACLASSES
from ._equinox import EQUINOX
from ._nnx import NNX
from ._sharedtree_module import MODULE
from ._treeo import TREEO

# The first answer counts. An object of NNX or a tree of treeo may be a dataclass, too, so dataclasses come last.
LIBRARIES.extend((EQUINOX, MODULE, NNX, TREEO, DATACLASSES))
