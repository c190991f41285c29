"""Small models for trial runs on a CPU: names and structure are those of the large ones."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "test/gpu"))
import models  # noqa: E402

TINY = dict(
    models.REAL["qwen3-8b"],
    hidden_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    intermediate_size=512,
    vocab_size=2048,
)
TINY_MOE = dict(
    models.REAL["qwen3-30b-a3b"],
    hidden_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    intermediate_size=256,
    moe_intermediate_size=64,
    num_experts=16,
    vocab_size=2048,
)
