"""Applications of an estimated Fisher: model averaging, EWC, importance, influence, Laplace approximation, task overlap."""
