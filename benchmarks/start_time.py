"""`python -m benchmarks.start_time [-- OPTIONS OF tokring serve]`: from the program's start to the first ready answer.

Seconds until /health says 200 and CPU seconds by process until then, medians of some starts. The first start
warms the page cache and is not counted. Without options: the embedded model.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.peers.places import PeerError
from benchmarks.peers.servers import Launch, start
from tokring.bench.machine import describe_host
from tokring.bench.serve.target import Target, cpu_seconds

POLL_S = 0.005


def measure(options: list[str]) -> dict[str, Any]:
    """One start. Raises PeerError if it fails."""
    command = (sys.executable, "-m", "tokring", "serve", "--port", "{port}", *options)
    began = time.monotonic()
    server = start(Launch("start-time", command))
    try:
        server.wait_ready(POLL_S)
        seconds = time.monotonic() - began
        target = Target("tokring", "127.0.0.1", server.port, "", "")
        return {"seconds": seconds, "cpu_s": cpu_seconds(target.processes())}
    finally:
        server.stop()


def summary(starts: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians and range; CPU by the processes' titles."""
    seconds = [found["seconds"] for found in starts]
    titles = sorted({title for found in starts for title in found["cpu_s"]})
    return {
        "starts": len(starts),
        "seconds": round(statistics.median(seconds), 3),
        "range": [round(min(seconds), 3), round(max(seconds), 3)],
        "cpu_s": {title: statistics.median(found["cpu_s"].get(title, 0.0) for found in starts) for title in titles},
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.start_time", description=(__doc__ or "").strip())
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--repetitions", type=int, default=5, metavar="N", help="counted starts (default: 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine and figures here")
    parser.add_argument("options", nargs="*", metavar="OPTION", help="of tokring serve, after --")
    arguments = parser.parse_args()
    try:
        starts = [measure(arguments.options) for _ in range(arguments.repetitions + 1)][1:]
    except PeerError as error:
        print(error, file=sys.stderr)
        return 1
    found = summary(starts)
    print(f"ready after {found['seconds']:.2f} s ({found['range'][0]:.2f} to {found['range'][1]:.2f})")
    for title, used in found["cpu_s"].items():
        print(f"  CPU {used:.2f} s  {title}")
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"machine": describe_host(), "options": arguments.options, **found}) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
