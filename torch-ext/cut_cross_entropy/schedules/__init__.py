"""Orders of loops over the primitives of a backend."""
