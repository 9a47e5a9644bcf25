"""The real `treeo` 0.0.10 on today's JAX; the very module that `import treeo` finds from now on."""

import sys
from typing import Any

from ._loading import load


def __getattr__(name: str) -> Any: ...  # for type checkers: this module is replaced by the real one


sys.modules[__name__] = load("treeo")
