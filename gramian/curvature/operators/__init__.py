"""Curvature matrices as operators with matrix-vector products: Hessian, Gauss-Newton, empirical Fisher, K-FAC."""
