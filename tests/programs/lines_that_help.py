"""Loads a file once the lines in the error have been run, which must be those that are expected."""

import sys

import sharedtree as st

try:
    st.load("a.safetensors")
except st.errors.UntrustedTypeError as error:
    told = [each.strip() for each in str(error).splitlines() if each.startswith("    import ")]
assert "; ".join(told) == sys.argv[1], told
assert not {each.split()[1] for each in told} & set(sys.modules)
exec(sys.argv[1])
print(type(st.load("a.safetensors")).__name__)
