"""Checks while a function is traced, and their warnings and errors: lost ties, leaks, retraces, partial gradients."""
