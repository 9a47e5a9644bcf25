"""Imports treex where there is a class of a treeo that was imported plainly."""
# ruff: noqa: F821 -- it follows `compat_state` and `compat_attempt`

import treeo


class Mine(treeo.Tree):
    pass


print(json.dumps(attempt("treex")))
