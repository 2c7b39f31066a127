"""The backend of Composable Kernel, AMD's library of GEMM templates in C++."""
