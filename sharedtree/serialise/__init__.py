"""The file format: models on disk, with every shared node once.

`convert`, `export`, `load`, `save` and `trust` are here the functions, and hide the modules and the folder of these
names.
"""

from . import orbax as orbax
from ._export import Exported as Exported, export as export
from .convert import Conversion as Conversion, convert as convert
from .load import from_bytes as from_bytes, load as load
from .look import (
    ArrayInfo as ArrayInfo,
    Audit as Audit,
    Inspection as Inspection,
    Verified as Verified,
    audit as audit,
    inspect as inspect,
    verify as verify,
)
from .plain_data import (
    StateReport as StateReport,
    load_state as load_state,
    register_state as register_state,
    state as state,
)
from .save import save as save, to_bytes as to_bytes
from .trust._resolving import Request as Request
from .trust._trust import trust as trust
from .values._paths import Line as Line
from .values._template import Difference as Difference, LoadReport as LoadReport

for _type in [found for found in [*globals().values()] if isinstance(found, type)]:
    _type.__module__ = __name__  # under which they are printed, pickled and documented
