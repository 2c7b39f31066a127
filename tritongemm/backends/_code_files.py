"""File names of compiled kernels."""

CODE_FILES = {"nvidia": "kernel.cubin", "amd": "kernel.hsaco"}  # by the vendor of the target
