"""How many prompt tokens a step computes beside decoding requests, by default."""

from tokring.checkpoint import ModelConfig
from tokring.config import config_from_options
from tokring.engine.runners import max_num_prefill_tokens


def model(num_layers, hidden_size, intermediate_size):
    return ModelConfig(
        architecture="llama",
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=hidden_size // 64,
        num_kv_heads=1,
        head_dim=64,
        vocab_size=512,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
    )


TINY, SMALL, LARGE = model(1, 64, 128), model(30, 576, 1536), model(32, 4096, 14336)


def test_on_the_cpu_the_chunk_beside_decoding_shrinks_with_the_models_size():
    config = config_from_options({})
    assert [max_num_prefill_tokens(config, "cpu", of) for of in (TINY, SMALL, LARGE)] == [512, 128, 32]


def test_what_is_asked_for_counts_and_other_backends_have_the_whole_budget():
    asked = config_from_options({"max_num_prefill_tokens": 7})
    assert max_num_prefill_tokens(asked, "cpu", LARGE) == max_num_prefill_tokens(asked, "cuda", LARGE) == 7
    assert max_num_prefill_tokens(config_from_options({}), "cuda", LARGE) == 2048
    assert max_num_prefill_tokens(config_from_options({"engine": "mock"}), "cpu", LARGE) == 512
