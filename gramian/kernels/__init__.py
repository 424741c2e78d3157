"""Fused Triton kernels, each beside a plain torch function of the same arguments that defines what it computes.

`<name>(...)` takes the Triton kernel for CUDA tensors in bfloat16, float16 or float32 where triton can be imported, and the
torch twin for everything else. `<name>_kernel` and `<name>_twin` can be called directly. Triton itself is imported by the
first kernel that runs. Nothing here is differentiable, no kernel uses atomics, and the same input gives the same bits.
"""
