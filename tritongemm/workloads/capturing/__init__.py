"""What a program asks PyTorch to multiply, seen while it runs, and written as a file of sizes.

`session` starts and stops it; `hooks` puts itself in the place of PyTorch's functions; `recorder` counts; `decompose`
says which products a call becomes; `workload_file` writes.
"""
