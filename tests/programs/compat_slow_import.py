"""Imports treex while another thread imports it plainly."""

import importlib
import json
import sys
import threading
import time
from importlib.abc import MetaPathFinder

import yaml

from sharedtree.compat import treeo


class Slow(MetaPathFinder):  # treex.utils imports yaml
    def find_spec(self, name, path, target=None):
        if name == "yaml":
            started.set()
            time.sleep(1)


started = threading.Event()
del sys.modules["yaml"]
sys.meta_path.insert(0, Slow())
other = threading.Thread(target=lambda: importlib.import_module("treex"))
other.start()
started.wait()
from sharedtree.compat import treex as tx

found = hasattr(tx, "Linear")
other.join()
print(json.dumps(found))
