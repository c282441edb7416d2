"""EngineCore: scheduler, KV cache bookkeeping, sampling and the models behind it. Knows token ids only, never text."""
