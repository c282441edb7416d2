"""Instruction-set level and threads of the native kernels, for the whole process."""

from tokring_kernels import _cpu
from tokring_kernels.array import Array


def supported_levels() -> list[str]:
    """Levels this processor can run, the slowest first: generic, avx2, avx512, avx512_vnni."""
    return _cpu.supported_levels()


def level() -> str:
    """The level kernels run at now."""
    return _cpu.level()


def set_level(name: str) -> None:
    """Makes every later call run at `name`. Raises ValueError if it is unknown or the processor lacks it."""
    _cpu.set_level(name)


def num_threads() -> int:
    """Threads a call may use, the calling one included; by default the usable cores less one."""
    return _cpu.num_threads()


def set_num_threads(num_threads: int, *, worker_nice: int = 0, spin_us: int = 30) -> None:
    """Sizes the pool of worker threads; results never depend on it.

    worker_nice is added to the workers' own nice value (10 on cores shared with a front end); spin_us is how long an
    idle worker spins before it sleeps. Must not be called while a kernel runs in another thread's call that expects
    its workers back soon: it waits for that call to end.
    """
    _cpu.set_num_threads(num_threads, worker_nice, spin_us)


def xor_words(words: Array) -> int:
    """The exclusive or of int64[n], read once by the pool's threads: benchmarks hold kernels against its rate."""
    return _cpu.xor_words(words)
