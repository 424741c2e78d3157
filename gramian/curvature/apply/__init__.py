"""Application: powers of the damped Fisher times gradients and other vectors."""
