"""Tests of `sharedtree.compat`; those that need treex are skipped where it is not installed."""
