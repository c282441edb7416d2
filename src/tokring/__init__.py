"""tokring: an LLM inference server built on shared-memory token rings."""
