"""Backend: kernels generated here and compiled by Triton."""

from tritongemm.system.stop_signals import postponed

with postponed():  # an interrupt while Triton's library is imported would end the process by an abort
    import triton  # noqa: F401
