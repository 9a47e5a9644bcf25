"""One page for each family of transforms: what it does to its operands, and what it hands back."""
