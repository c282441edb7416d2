"""Where the peers are installed and what is made for them; all of it below build/, so `make clean` removes it."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2] / "build" / "peers"
VLLM = ROOT / "vllm"  # a virtual environment
LLAMA_CPP = ROOT / "llama.cpp"
LLAMA_CPP_TOOLS = LLAMA_CPP / "build" / "bin"
TCMALLOC = ROOT / "tcmalloc"
WEIGHTS = ROOT / "weights"
LOGS = ROOT / "logs"


class PeerError(Exception):
    """A peer can't be installed, started or measured: which one and why, in one line."""
