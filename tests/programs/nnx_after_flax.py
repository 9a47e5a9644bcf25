"""Loads a file of Flax NNX where nothing, and where only `flax` is imported."""

import sharedtree as st

for before in ("", "import flax"):
    exec(before)
    try:
        st.load("a.safetensors", trusted="flax")
    except st.errors.UntrustedTypeError as error:
        fixes = [each.strip() for each in str(error).splitlines() if each.startswith("    import")]
        assert fixes[0] == "import flax.nnx", fixes
    else:
        assert before
exec("; ".join(fixes))
print(type(st.load("a.safetensors", trusted="flax")).__name__)
