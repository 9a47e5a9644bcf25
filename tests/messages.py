"""The warnings and the error of one call."""

import warnings

import pytest

import sharedtree as st


def warnings_of(f, *args):
    """Calls the function and returns the text of each `UntiedWarning`. There must be no other warning."""
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        f(*args)
    assert {w.category for w in record} <= {st.UntiedWarning}
    return [str(w.message) for w in record]


def conflict(call):
    """Makes the call and returns the `InconsistentSharingError` that it must raise."""
    with pytest.raises(st.errors.InconsistentSharingError) as caught:
        call()
    return caught.value
