"""python -m tests.support.with_few_descriptors -- N ARGUMENTS …: python with a hard limit of N open files."""

import os
import resource
import sys

if __name__ == "__main__":
    limit = int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    os.execv(sys.executable, [sys.executable, *sys.argv[3:]])
