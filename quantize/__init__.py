"""Turn a source checkpoint into a low-bit one: the layer walk, the solvers, the writer."""
