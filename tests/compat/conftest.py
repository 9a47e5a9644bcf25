"""Where treex is not installed, what its tests are made of cannot be imported."""

import importlib.util

collect_ignore = [] if importlib.util.find_spec("treex") else ["strategies.py", "treex_models.py"]
