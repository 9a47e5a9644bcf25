"""Opens files in many ways and judges each: a good file, `all` or `in turn`, and the files."""

import contextlib
import sys

with contextlib.suppress(ImportError):  # where there is none, only what hangs is ended
    import resource

    resource.setrlimit(resource.RLIMIT_CPU, (600, 600))  # of work: on a busy machine it takes any time
# All that a file may need, before imports are watched.
import jax
import numpy as np
import optax

import sharedtree as st

st.load(sys.argv[1])
from tests.serialise.forgeries import Case
from tests.serialise.judging import judge, watch

sys.addaudithook(watch)
others = [st.verify, lambda d: str(st.inspect(d)), lambda d: str(st.audit(d))]
for number, name in enumerate(sys.argv[3:]):
    with open(name, "rb") as file:
        data = file.read()
    for operation in (st.from_bytes, *(others if sys.argv[2] == "all" else [others[number % 3]])):
        outcome = judge(Case(data, None, ("nest_deeply",)), operation, gives_model=False)
        print(name.rpartition("/")[2], *outcome, flush=True)
