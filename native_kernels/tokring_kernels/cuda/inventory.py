"""All kernels there are, for the compile gates and for whoever wants to compile ahead."""

from tokring_kernels.cuda import attention, catalogue
from tokring_kernels.cuda.kernel import Kernel


def all_kernels() -> list[Kernel]:
    """Every variant of every kernel."""
    return [*catalogue.KERNELS, *attention.all_kernels()]


def quick_kernels() -> list[Kernel]:
    """Every kernel in one or two variants: what the tests compile each time."""
    first_variants = {kernel.function: kernel for kernel in reversed(catalogue.KERNELS)}
    return [*reversed(first_variants.values()), *attention.quick_kernels()]
