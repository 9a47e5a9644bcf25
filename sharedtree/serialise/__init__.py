"""Files: models on disk, with every shared node once; exported programs, too.

This room turns trees into files, and anyone's files into trees. It calls nothing by a file's word.

    save.py, load.py            the steps of saving and loading, one after the other
    values/                     tree ⇄ manifest
    trust/                      what a file may name
    arrays/                     arrays ⇄ bytes
    container/                  bytes, manifest and digests ⇄ one safetensors file
    orbax.py, _export.py        the same trees in Orbax checkpoints and exported programs

Texts of a file are made printable in `core/_printing.py`; `SharedTreeError` does it for every message.

Here `load`, `save` and `trust` are the functions. They hide the modules and the folder of these names.
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

# They are printed, pickled and documented under the public module.
for _type in [value for value in [*globals().values()] if isinstance(value, type)]:
    _type.__module__ = __name__
Exported.__module__ = __name__.partition(".")[0]
