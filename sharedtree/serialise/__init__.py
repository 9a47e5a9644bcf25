"""Files: models on disk, with every shared node once; exported programs, too.

In come trees, and files of anyone; out go files and trees. Never calls anything by a file's word. `load`, `save` and
`trust` are here the functions, and hide the modules and the folder of these names.
"""

from . import orbax as orbax
from ._export import Exported as Exported, export as export
from .inspect_and_audit import (
    ArrayInfo as ArrayInfo,
    Audit as Audit,
    Inspection as Inspection,
    Verified as Verified,
    audit as audit,
    inspect as inspect,
    verify as verify,
)
from .load import from_bytes as from_bytes, load as load
from .save import save as save, to_bytes as to_bytes
from .trust._resolved_names import Request as Request
from .trust._trusted_names import trust as trust
from .values._paths import Line as Line
from .values._template import Difference as Difference, LoadReport as LoadReport

for _type in [found for found in [*globals().values()] if isinstance(found, type)]:
    _type.__module__ = __name__  # under which they are printed, pickled and documented
Exported.__module__ = __name__.partition(".")[0]
