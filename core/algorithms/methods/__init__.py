"""The published methods, each a small class in a file of its own. `cotune.algorithms.catalogue` lists them."""
