"""The fault matrix: one module for each kind of fault."""
