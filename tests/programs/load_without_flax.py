"""Loads a file of Flax NNX, which is imported only when the error says so."""

import sys

import sharedtree as st

assert "flax" not in sys.modules
try:
    st.load("file.safetensors", trusted="flax")
except st.errors.UntrustedTypeError as error:
    told = [line.strip() for line in str(error).splitlines() if line.startswith("    import ")]
assert "flax" not in sys.modules
exec("; ".join(told))
loaded = st.load("file.safetensors", trusted="flax")
print(type(loaded["layer"]).__name__, loaded["layer"].layers[0].kernel.shape, loaded["state"]["kernel"].shape)
