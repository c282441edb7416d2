"""--device: what is chosen, what is said where CUDA can't be used, and that nothing of CUDA is loaded before."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.tiny_hf import write_tiny_hf
from tokring.checkpoint import ModelConfig, open_checkpoint
from tokring.config import Config, ConfigError, EngineSettings, ModelSettings
from tokring.engine.cuda import device
from tokring.engine.cuda.device import Driver, NoCuda, choose_device, find_cuda, read_driver
from tokring.engine.runners import check_kv_cache_dtype

DRIVER = r"""
#include <cstring>
extern "C" {
int cuInit(unsigned) { return INIT; }
int cuDriverGetVersion(int* version) { *version = VERSION; return 0; }
int cuDeviceGetCount(int* count) { *count = COUNT; return 0; }
int cuDeviceGet(int* device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetName(char* name, int size, int) { std::strncpy(name, "Test GPU", size); return 0; }
int cuDeviceGetAttribute(int* value, int attribute, int) { *value = attribute == 75 ? MAJOR : MINOR; return 0; }
int cuGetErrorName(int code, const char** name) { *name = code == 100 ? "CUDA_ERROR_NO_DEVICE" : nullptr; return 0; }
}
"""


@pytest.fixture
def driver(tmp_path):
    """Builds a libcuda that says what a test wants."""

    def build(**values: int) -> str:
        facts = {"INIT": 0, "VERSION": 13000, "COUNT": 1, "MAJOR": 9, "MINOR": 0} | values
        source, library = tmp_path / "driver.cpp", tmp_path / "libcuda.so.1"
        source.write_text(DRIVER)
        defines = [f"-D{name}={value}" for name, value in facts.items()]
        subprocess.run(["g++", "-shared", "-fPIC", *defines, str(source), "-o", str(library)], check=True)
        return str(library)

    return build


@pytest.fixture
def model() -> ModelConfig:
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "head_dim"), 64)
    counts = dict.fromkeys(("num_layers", "num_heads", "num_kv_heads"), 1)
    return ModelConfig(
        architecture="llama", **sizes, **counts, vocab_size=64, max_position_embeddings=64, rms_norm_eps=1e-5,
        rope_theta=1e4,
    )  # fmt: skip


def config(asked: str = "auto", dtype: str = "auto", engine: str = "torch") -> Config:
    return Config(model=ModelSettings(dtype=dtype), engine=EngineSettings(device=asked, engine=engine))


def test_without_a_driver_auto_is_the_cpu_and_the_log_says_why(model, monkeypatch, caplog):
    monkeypatch.setattr(find_cuda, "__defaults__", ("libcuda-that-is-not-there.so",))
    with caplog.at_level(logging.INFO):
        assert choose_device(config(), model) == "cpu"
    assert "there is no NVIDIA driver (libcuda-that-is-not-there.so: cannot open shared object file" in caplog.text
    with pytest.raises(ConfigError, match="--device cuda: there is no NVIDIA driver"):
        choose_device(config("cuda"), model)


def test_the_cpu_and_the_mock_engine_ask_nobody(model, monkeypatch):
    monkeypatch.setattr(device, "find_cuda", lambda *_: pytest.fail("asked"))
    assert choose_device(config("cpu"), model) == "cpu"
    assert choose_device(config("cuda", engine="mock"), model) == "cpu"


def test_the_driver_is_read_without_any_cuda_package(driver):
    assert read_driver(driver(VERSION=13010, MAJOR=12, MINOR=0)) == Driver(
        version=13010, device_name="Test GPU", capability=(12, 0)
    )


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"INIT": 100}, r"cuInit says CUDA_ERROR_NO_DEVICE \(100\)"),
        ({"INIT": 7}, "cuInit says error 7"),
        ({"COUNT": 0}, "shows no GPU: see CUDA_VISIBLE_DEVICES"),
        ({"MAJOR": 7, "MINOR": 5}, r"Test GPU has compute capability 7.5, needed is 8.0 \(Ampere\) or newer"),
        ({"VERSION": 12040}, r"the NVIDIA driver supports CUDA 12.4, needed is 13.0 or newer"),
    ],
)
def test_a_driver_or_gpu_that_does_not_do_is_named(driver, model, facts, reason):
    with pytest.raises(NoCuda, match=reason):
        find_cuda(config(), model, driver(**facts))


def test_what_is_no_driver_at_all_is_named(tmp_path, model):
    damaged, source = tmp_path / "libcuda.so.1", tmp_path / "other.cpp"
    damaged.write_bytes(b"nothing that could be loaded")
    with pytest.raises(NoCuda, match=r"there is no NVIDIA driver \(.*libcuda.so.1: file too short\)"):
        find_cuda(config(), model, str(damaged))
    source.write_text('extern "C" int cuInit(unsigned) { return FOUND; }')
    for found, reason in ((0, "it has no cuDriverGetVersion"), (100, "cuInit says error 100")):
        other = str(tmp_path / f"libother-{found}.so")
        subprocess.run(["g++", "-shared", "-fPIC", f"-DFOUND={found}", str(source), "-o", other], check=True)
        with pytest.raises(NoCuda, match=reason):
            find_cuda(config(), model, other)


@pytest.mark.parametrize(
    ("sizes", "dtype", "reason"),
    [
        ({"head_dim": 48}, "auto", "heads have 48 dimensions, there are kernels for 64, 80, 96, 128, 256"),
        ({"hidden_size": 60}, "auto", "hidden_size is 60, the kernels take multiples of 8"),
        ({"hidden_size": 16392}, "auto", "hidden_size is 16392, the kernels take at most 16384"),
        ({"vocab_size": 2**20 + 1}, "auto", "vocab_size is 1048577, the kernels take at most 1048576"),
        ({}, "float32", "it computes in bfloat16, and --dtype is float32"),
    ],
)
def test_what_the_kernels_do_not_cover_is_named(driver, model, sizes, dtype, reason):
    with pytest.raises(NoCuda, match=reason):
        find_cuda(config(dtype=dtype), replace(model, **sizes), driver())


@pytest.fixture
def cuda_torch(monkeypatch):
    """As far as the build goes."""
    monkeypatch.setattr(device, "check_torch_build", lambda: None)


def test_a_missing_cupy_is_named_with_the_remedy_before_torch_is_loaded(driver, model, monkeypatch):
    monkeypatch.setattr(device, "check_torch_build", lambda: pytest.fail("torch was loaded"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(NoCuda, match=r"CuPy is missing: pip install 'tokring\[cuda\]'"):
        find_cuda(config(), model, driver())


def test_a_cupy_that_lacks_a_library_is_named_with_the_library(monkeypatch):
    """CuPy puts a frame of === around its explanation."""
    monkeypatch.setattr(device, "import_nvrtc", lambda: exec(CUPY_INIT))
    with pytest.raises(NoCuda, match=r"^CuPy can't be loaded: libcudart.so.13: cannot open shared object file$"):
        device.check_packages(HOPPER)


CUPY_INIT = """
try:
    raise ImportError("libcudart.so.13: cannot open shared object file")
except ImportError as error:
    raise ImportError("\\n=====\\nFailed to import CuPy.\\n=====\\n") from error
"""
HOPPER = Driver(version=13000, device_name="Test GPU", capability=(9, 0))


def test_cupy_loads_without_a_home_that_can_be_written(tmp_path):
    """It makes a directory there otherwise; the one of our kernels does as well."""
    (tmp_path / "no-directory").touch()
    home, cache = tmp_path / "no-directory", tmp_path / "cache"
    program = "from tokring_kernels.cuda.compiler import import_nvrtc; print(import_nvrtc().getVersion())"
    environment = os.environ | {"HOME": str(home), "XDG_CACHE_HOME": str(cache)}
    environment.pop("CUPY_CACHE_DIR", None)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=100)
    assert done.returncode == 0 and done.stdout.startswith("("), done.stderr
    assert (cache / "tokring" / "kernels").is_dir()


def test_a_gpu_that_is_newer_than_nvrtc_is_named(driver, model, cuda_torch):
    with pytest.raises(NoCuda, match=r"NVRTC 13\.\d+ can't compile for Test GPU \(compute capability 99\.0\)"):
        find_cuda(config(), model, driver(MAJOR=99))


@pytest.mark.parametrize("version", ["2.9.0", "2.9.0+cpu"])
def test_a_torch_without_cuda_is_named_before_cupy_is_loaded(driver, model, monkeypatch, version):
    import torch

    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    monkeypatch.setattr(device, "check_packages", lambda driver: pytest.fail("CuPy was loaded"))
    with pytest.raises(NoCuda, match=f"torch {re.escape(version)} is built without CUDA"):
        find_cuda(config(), model, driver())


def test_a_missing_torch_is_named(monkeypatch):
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", missing)
    with pytest.raises(NoCuda, match="the package torch is missing"):
        device.check_torch_build()


def test_on_a_machine_without_gpu_neither_cupy_nor_torch_is_imported(tmp_path: Path):
    """The engine's own start-up with `--device auto`; a cupy that is found first would tell on itself."""
    write_tiny_hf(tmp_path / "model")
    (tmp_path / "cupy").mkdir()
    (tmp_path / "cupy" / "__init__.py").write_text("raise SystemExit('cupy was imported')\n")
    program = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from tokring.config import Config, EngineSettings, ModelSettings
from tokring.checkpoint import open_checkpoint
from tokring.engine.__main__ import build_core
from tokring.engine.cuda import device
device.find_cuda.__defaults__ = ("libcuda-that-is-not-there.so",)
class Page:
    set = add = observe = lambda *_: None
config = Config(model=ModelSettings(model={str(tmp_path / "model")!r}), engine=EngineSettings(max_num_seqs=2))
checkpoint = open_checkpoint(config.model.model)
chosen = device.choose_device(config, checkpoint.config)
assert build_core(config, checkpoint, chosen, Page()).runner.name.startswith("cpu")
assert not {{"cupy", "cupy_backends", "cuda", "torch"}} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("asked", "dtype", "device_name", "fits"),
    [
        ("bf16", "auto", "cpu", True),
        ("fp8", "auto", "cuda", True),
        ("int8", "auto", "cpu", True),
        ("fp8", "auto", "cpu", False),
        ("bf16", "float32", "cpu", False),
    ],
)
def test_a_kv_cache_that_the_backend_can_not_keep_is_refused_with_what_it_can(asked, dtype, device_name, fits):
    settings = Config(model=ModelSettings(dtype=dtype), engine=EngineSettings(kv_cache_dtype=asked))
    if fits:
        check_kv_cache_dtype(settings, device_name)
        return
    with pytest.raises(ConfigError, match=f"--kv-cache-dtype {asked}: can't be kept .*; known there: auto"):
        check_kv_cache_dtype(settings, device_name)


def test_a_kv_cache_format_that_no_backend_has_is_no_choice():
    with pytest.raises(ConfigError, match="--kv-cache-dtype fp16: must be one of auto, bf16, int8, fp8"):
        EngineSettings(kv_cache_dtype="fp16")


def test_the_checkpoint_decides_too(tmp_path, monkeypatch):
    """Heads of 16 dimensions: --device auto serves such a model on the CPU even where CUDA is there."""
    monkeypatch.setenv(device.EMULATION_VARIABLE, "1")
    small = open_checkpoint(str(write_tiny_hf(tmp_path / "small"))).config
    assert choose_device(config(), small) == "cpu"
    assert choose_device(config(), replace(small, head_dim=64)) == "cuda"
