"""Imports treex after a plain import of it failed."""

import json
import sys

try:
    import treex
except ImportError:
    pass
left = [name for name in sys.modules if name.startswith("treex")]
old = sys.modules["treeo"]
from sharedtree.compat import treeo as to, treex as tx

print(json.dumps(bool(left) and to is not old and issubclass(tx.Module, to.Tree)))
