"""CUDA kernels: native_kernels/cuda, compiled at run time. Importing this package loads neither CuPy nor CUDA."""
