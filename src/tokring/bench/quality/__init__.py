"""`tokring bench quality`: how far quantized weights and caches move a model from its float32 logits."""
