"""Loads a file that claims to be large, and fails if memory is allocated for it."""

import sys
import tracemalloc

import pytest

import sharedtree as st

for is_measured in (False, True):
    tracemalloc.start()
    with pytest.raises(st.errors.CorruptFileError, match="was cut short"):
        st.load(sys.argv[1], foreign=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert not is_measured or peak < 10**6, peak
