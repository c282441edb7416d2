"""Whether the prefill kernel for Hopper is right on this device: it is tried beside its twin before it is used.

Its descriptors and fences are bits that only hardware reads, and no GPU was there when it was written. On a GPU the
trial is a process of its own, `python -m tokring.engine.cuda.prefill_trial SHAPE`: a kernel that faults takes the CUDA
context with it, and one that hangs is killed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import subprocess
import sys

import torch

from tokring.engine.cuda.backend import Device
from tokring.engine.cuda.device import one_line
from tokring.engine.cuda.open_device import open_device
from tokring.launch.child import die_with_parent
from tokring_kernels.cuda.attention import AttentionShape, paged_prefill

logger = logging.getLogger(__name__)

TIMEOUT_S = 180.0  # with the compilation of both kernels
KILL_TIMEOUT_S = 5.0  # longer only for who is stuck in the driver: it is left to its end
BLOCK = 16
LENGTHS, RUNS = (400, 150, 17, 128), (100, 150, 1, 20)  # of sequences, and of the new tokens that end them
BATCHES_OF_GPU = 16  # as many of those sequences at once, so that all of its multiprocessors are busy
LOOKS = ((0, 0.0), (200, 0.0), (0, 20.0))  # window, soft cap
TOLERANCE = 2e-2  # of a head's output in the Euclidean norm; both round weights and output to bfloat16


class PrefillTrial:
    """Whether prefill of that shape should take the kernel for Hopper. On a GPU it is tried while weights load."""

    def __init__(self, device: Device, shape: AttentionShape) -> None:
        self._device, self._shape = device, shape
        self._is_wanted = device.has_warpgroups and shape.has_warpgroup_prefill
        on_gpu = device.torch_device.type == "cuda"
        self._apart = TrialApart(shape) if self._is_wanted and on_gpu else None

    def passed(self) -> bool:
        """Wait for the outcome. One line of the log says how a trial went."""
        if not self._is_wanted:
            return False
        fault = self._apart.fault() if self._apart else fault_of(self._device, self._shape)
        if fault:
            logger.warning("the prefill kernel for Hopper is not used, its twin for all GPUs is: %s", fault)
        else:
            logger.info("prompts are computed by the kernel for Hopper; it agrees with its twin on this device")
        return not fault


class TrialApart:
    """fault_of() in a process of its own, on the device that it opens."""

    def __init__(self, shape: AttentionShape) -> None:
        shape_text = json.dumps(dataclasses.asdict(shape))
        command = [sys.executable, "-P", "-m", __name__, shape_text, str(os.getpid())]
        pipe = subprocess.PIPE
        self._process: subprocess.Popen[str] | OSError
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True)
        except OSError as error:
            self._process = error

    def fault(self, timeout_s: float = TIMEOUT_S) -> str:
        if isinstance(self._process, OSError):
            return f"its trial did not start: {self._process}"
        try:
            output, errors = self._process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.communicate(timeout=KILL_TIMEOUT_S)
            return f"its trial took more than {timeout_s:g} s"
        if self._process.returncode == 0:
            return output.strip()
        last_line = (errors.strip().splitlines() or ["no message"])[-1]
        return f"its trial ended with code {self._process.returncode}: {last_line[:300]}"


def fault_of(device: Device, shape: AttentionShape) -> str:
    """What is wrong with the kernel on that device, in words; "" if it does what its twin does."""
    for window, soft_cap in LOOKS:
        try:
            found, expected = (_prefill(device, shape, window, soft_cap, warpgroups) for warpgroups in (True, False))
        except RuntimeError as error:  # of the driver, CuPy, torch or the emulation
            return f"it fails: {one_line(error)}"
        distance = torch.linalg.vector_norm(found - expected, dim=-1)
        share = distance / torch.linalg.vector_norm(expected, dim=-1)
        worst = float(share.nan_to_num(torch.inf).max())
        if worst > TOLERANCE:
            return f"its results differ by {worst:.1g} of a head's output (window {window}, soft cap {soft_cap:g})"
    return ""


def _prefill(device: Device, shape: AttentionShape, window: int, soft_cap: float, warpgroups: bool) -> torch.Tensor:
    """float32[tokens, heads, head_dim] on the CPU: the same random sequences each time, in shuffled blocks."""
    random = torch.Generator().manual_seed(1)
    dtype = {"Bf16": torch.bfloat16, "F16": torch.float16}[shape.element]
    batches = BATCHES_OF_GPU if device.torch_device.type == "cuda" else 1
    lengths, runs = LENGTHS * batches, RUNS * batches
    widths = [-(-length // BLOCK) for length in lengths]
    blocks = torch.split(torch.randperm(sum(widths), generator=random, dtype=torch.int32), widths)
    table = torch.nn.utils.rnn.pad_sequence(list(blocks), batch_first=True, padding_value=-1)

    def on_device(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous().to(device.torch_device)

    caches = []
    for _ in range(2):
        cache = torch.randn((sum(widths), shape.num_kv_heads, BLOCK, shape.head_dim), generator=random).to(dtype)
        for length, ids in zip(lengths, blocks, strict=True):
            if length % BLOCK:
                cache[ids[-1], :, length % BLOCK :] = torch.nan  # what nobody has written must not be seen
        caches.append(on_device(cache))
    query = on_device(torch.randn((sum(runs), shape.num_heads, shape.head_dim), generator=random).to(dtype) * 2)
    block_table, query_starts = on_device(table), on_device(torch.tensor([0, *runs]).cumsum(0).to(torch.int32))
    all_lengths = on_device(torch.tensor(lengths, dtype=torch.int32))
    out = torch.full_like(query, torch.nan)
    paged_prefill(
        device.launcher,
        shape,
        out=out.data_ptr(),
        query=query.data_ptr(),
        key_cache=caches[0].data_ptr(),
        value_cache=caches[1].data_ptr(),
        block_table=block_table.data_ptr(),
        query_starts=query_starts.data_ptr(),
        lengths=all_lengths.data_ptr(),
        num_sequences=len(lengths),
        longest_run=max(runs),
        table_width=table.shape[1],
        scale=shape.head_dim**-0.5,
        window=window,
        soft_cap=soft_cap,
        warpgroups=warpgroups,
    )
    return out.float().cpu()


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]))
    print(fault_of(open_device(), AttentionShape(**json.loads(sys.argv[1]))))
