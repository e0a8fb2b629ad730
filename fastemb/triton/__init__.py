"""Triton kernels: they serve CUDA tensors where the CUDA library was not built.

`fastemb.triton.kernels` maps the name of every operator in ``fastemb/_ops.py`` to its function.
With ``TRITON_INTERPRET=1`` set before Triton is imported, the same kernels run, slowly, on CPU
tensors.

Results lie within the bounds of the numerics contract (``csrc/ops.h``) and are the same on every
run on one device; they are not bit for bit those of the CPU and CUDA kernels, which add in another
order.
"""
