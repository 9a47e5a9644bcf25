"""What is known of each library's classes: one file a library.

Classes come in; how their instances are read, made and written goes out. Imports no library that the program has not
imported, and is asked by the rooms above and never asks them.
"""

from ..core._libraries import LIBRARIES
from ._dataclasses import DATACLASSES
from ._equinox import EQUINOX
from ._module import MODULE
from ._nnx import NNX
from ._treeo import TREEO

# Objects of NNX's and trees of treeo's may be dataclasses, too, so those are asked last.
LIBRARIES.extend((EQUINOX, MODULE, NNX, TREEO, DATACLASSES))
