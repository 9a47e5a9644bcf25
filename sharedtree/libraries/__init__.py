"""What is known of each library's classes: one file a library, a row a library; of optax only `optim` asks.

In come classes; out goes how their instances are read, made, written back, trained and saved. Never imports a library
that the program has not imported, nor anything of the rooms above.
"""

from ..core._node_types import LIBRARIES
from ._dataclasses import DATACLASSES
from ._equinox import EQUINOX
from ._nnx import NNX
from ._sharedtree_module import MODULE
from ._treeo import TREEO

# Objects of NNX's and trees of treeo's may be dataclasses, too, so those are asked last.
LIBRARIES.extend((EQUINOX, MODULE, NNX, TREEO, DATACLASSES))
