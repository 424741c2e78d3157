"""Fused Triton kernels, each with a plain torch function of the same arguments (its twin) that defines the result.

`<name>(...)` runs the Triton kernel for CUDA tensors in bfloat16, float16 or float32 if triton is installed, and the torch twin
for everything else. `<name>_kernel` and `<name>_twin` can be called directly. Triton itself is imported by the first kernel
that runs. Nothing here is differentiable, no kernel uses atomics, and the same input gives the same bits.
"""
