"""What is checked while a function is traced, and what is said of it: lost ties, leaks, retraces, partial gradients."""
