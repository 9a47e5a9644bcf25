"""Table of the libraries whose classes are supported. Each library has a file and a row in the table: a `Library`.

A `Library` answers questions about a class: how its instances are read, made, written back, trained and saved. Except
for Equinox, none of these files imports a library that the program has not imported. Of the packages of sharedtree they
import only `core`. Two files have more than a row: `_optax`, which `optim` uses, and `_flax_linen`, which views use.
"""

from ..core._node_types import LIBRARIES
from ._dataclasses import DATACLASSES
from ._equinox import EQUINOX
from ._flax_linen import FLAX
from ._nnx import NNX
from ._optax import OPTAX
from ._sharedtree_module import MODULE
from ._treeo import TREEO

# The first answer counts. An object of NNX or a tree of treeo may be a dataclass, too, so dataclasses come last.
LIBRARIES.extend((EQUINOX, MODULE, NNX, TREEO, FLAX, OPTAX, DATACLASSES))
