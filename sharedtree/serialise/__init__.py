"""The file format: models on disk, with every shared node once."""

from . import orbax as orbax
from ._asked_names import Request as Request
from ._converting import Conversion as Conversion, convert as convert
from ._loading import from_bytes as from_bytes, load as load
from ._looking import (
    ArrayInfo as ArrayInfo,
    Audit as Audit,
    Inspection as Inspection,
    Verified as Verified,
    audit as audit,
    inspect as inspect,
    verify as verify,
)
from ._outline import Line as Line
from ._saving import save as save, to_bytes as to_bytes
from ._template import Difference as Difference, LoadReport as LoadReport
from ._trust import trust as trust
