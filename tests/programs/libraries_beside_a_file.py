"""Loads files that ask for libraries, in a folder with files that are named like these."""

import glob
import sys

import sharedtree as st

names = sys.argv[1:]
before = set(sys.modules)
assert not set(names) & before
audit = st.audit("all.safetensors")
assert {request.not_imported for request in audit.not_imported} == set(names)
assert all(request.allowed and not request.found for request in audit.not_imported)
assert "allowed, once `optax` is imported" in str(audit) and "    import optax" in str(audit)
for options in ({}, {"trusted": ["optax", "chex"]}, {"trusted": "chex:Foo"}):
    try:
        st.load("all.safetensors", **options)
    except st.errors.UntrustedTypeError as error:
        fixes = [line.strip() for line in str(error).splitlines() if line.startswith("    import ")]
        assert sorted(fixes) == [f"import {name}" for name in sorted(names)], error
        assert "trusted=" not in str(error), error
st.trust("lineax")
try:
    st.load("state.safetensors")
except st.errors.UntrustedTypeError as error:
    assert error.names == ("optax:ScaleByScheduleState",)
    fix = str(error).splitlines()[-1].strip()
assert set(sys.modules) - before <= {"packaging"} | {n for n in sys.modules if n.split(".")[0] not in names}
assert not glob.glob("ran_*")

import flax

assert st.load("flax.safetensors", like=(flax.ScaleByScheduleState,))
exec(fix)
assert st.load("state.safetensors")[0] is sys.modules["optax"].ScaleByScheduleState
assert st.audit("state.safetensors").not_imported == ()
assert sorted(glob.glob("ran_*")) == ["ran_flax", "ran_optax"]
