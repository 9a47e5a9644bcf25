"""Inspects and shows a file of many references, and prints how many MiB that took."""

import pathlib
import resource
import sys

import sharedtree as st
from sharedtree.__main__ import main

data = pathlib.Path(sys.argv[1]).read_bytes()
str(st.inspect(st.to_bytes([1])))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = st.inspect(data)
assert str(found).count("\n") == 10_001, str(found).count("\n")
assert sum(1 for _ in found.lines) == 240_001
assert main(["show", *sys.argv[2:], sys.argv[1]]) == 0
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
