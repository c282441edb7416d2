"""CUDA kernels: sources in `native_kernels/cuda`, compiled at run time by NVRTC, or by g++ for an emulation on the CPU.

Importing this package imports neither CuPy nor torch; `DriverLauncher` and `Compiler.cubin` import CuPy when called.
"""
