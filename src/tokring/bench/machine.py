"""describe_machine, describe_host: where and with what a run was made."""

from __future__ import annotations

import os
import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from tokring.bench.pair import Setup
from tokring.bench.vllm_messages import definitions

PACKAGES = ("tokring", "numpy", "uvloop", "pyzmq", "msgspec", "orjson", "iceoryx2")


def describe_machine(setup: Setup) -> dict[str, Any]:
    return {
        **describe_host(),
        "cores": list(setup.cores),
        "vllm_messages": definitions().source,
        "realtime": setup.realtime,
    }


def describe_host() -> dict[str, Any]:
    return {
        "cpu": _cpu_model(),
        "cpus": os.cpu_count(),
        "kernel": platform.release(),
        "python": sys.version.split()[0],
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "load_average": round(os.getloadavg()[0], 2),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_model() -> str:
    with open("/proc/cpuinfo") as cpuinfo:
        for line in cpuinfo:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.machine()
