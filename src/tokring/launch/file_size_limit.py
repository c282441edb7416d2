"""The limit of file sizes holds for shared memory too: an error that it causes is told with its name."""

import errno
import resource


def in_words(error: Exception) -> str:
    """The error's own, and of one of file size (EFBIG) the limit and what sets it."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if not isinstance(error, OSError) or error.errno != errno.EFBIG or limit == resource.RLIM_INFINITY:
        return str(error)
    return f"{error}: the limit of file sizes is {limit >> 10} KiB, which shared memory is bound by too (ulimit -f)"
