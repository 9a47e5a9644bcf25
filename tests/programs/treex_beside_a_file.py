"""Audits and loads a file of treex in a folder with files that are named like packages."""

import pathlib
import sys

sys.path.insert(0, "")
import sharedtree as st

for name in ("treex", "treeo"):
    pathlib.Path(f"{name}.py").write_text("open('ran', 'w').close()")
    print(st.audit("model.safetensors"))
    try:
        st.load("model.safetensors")
    except st.errors.UntrustedTypeError as error:
        print(error)
    assert name not in sys.modules
