"""Asks for the training state where Flax is not installed."""

import pydoc
import sys

sys.modules["flax"] = None  # as if it were not installed
import sharedtree as st

pydoc.render_doc(st)  # which uses all that `dir` lists
for use in ("from sharedtree.linen import TrainState", "import sharedtree.linen", "st.linen"):
    try:
        exec(use)
    except ImportError as error:
        print(error.name.partition(".")[0], str(error).splitlines())
assert "linen" not in vars(st)
