"""Uses of an estimated Fisher: merging, consolidation, importance, influence, Laplace, overlap."""
