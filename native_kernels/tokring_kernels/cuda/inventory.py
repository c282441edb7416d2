"""All kernels there are, for the compile gates and for whoever wants to compile ahead."""

from tokring_kernels.cuda import attention
from tokring_kernels.cuda.kernel import Kernel


def all_kernels() -> list[Kernel]:
    """Every variant of every kernel."""
    return attention.all_kernels()


def quick_kernels() -> list[Kernel]:
    """Every kernel in a few variants: what the tests compile each time."""
    return attention.quick_kernels()
