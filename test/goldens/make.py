"""Makes the golden models and what transformers computes with them.

    python test/goldens/make.py [NAME ...]       (torch, transformers 5, safetensors)

Without names all models and rope.json are made anew. Every folder beside this file is a tiny random model as
save_pretrained writes it, plus golden.json:

    cases[]: prompt     token ids
             positions  positions of the prompt whose logits are kept
             logits     base64 of float32 [positions, vocab]: the stored weights, computed in float32
             bf16       base64 of bfloat16 [positions, vocab]: the same, computed in bfloat16
             greedy     32 tokens, float32, without regard to end-of-sequence
             gaps       logit of the best token less that of the second, for each of them
             logprobs   by temperature: of tokens 1.. of prompt + greedy, given all before
             experts    mixtures of experts: base64 of uint8 [prompt + greedy, sparse layers, experts per token],
                        float32: the experts of each token, best first

rope.json holds inverse frequencies and scales of many rope_parameters. The stored weights define the model: float32
logits come from the bfloat16 (or float16) weights, widened.
"""

import base64
import json
import shutil
import sys
from pathlib import Path

import torch
import transformers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

HERE = Path(__file__).parent
PROMPT_LENGTHS = (1, 7, 33)
GREEDY = 32
TEMPERATURES = (1.0, 0.7)

SMALL = dict(
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=128,
    vocab_size=320,
    max_position_embeddings=512,
    bos_token_id=1,
    eos_token_id=2,
)
TINY = dict(SMALL, num_hidden_layers=1, intermediate_size=64, vocab_size=128)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=500000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
LINEAR = dict(rope_type="linear", rope_theta=10000.0, factor=2.0)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=32)


def moe(**fields):
    return dict(num_experts_per_tok=2, moe_intermediate_size=32, head_dim=16, norm_topk_prob=True) | fields


def version4(config):
    """The same model as transformers 4 wrote it, and a list of end-of-sequence ids."""
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    rope["type"] = rope.pop("rope_type")
    config["rope_scaling"] = rope
    config["torch_dtype"] = config.pop("dtype")
    config.pop("layer_types", None)
    config["use_sliding_window"] = False
    config["sliding_window"] = 4096
    config["eos_token_id"] = [2, 5]
    config["transformers_version"] = "4.46.0"
    return config


# name: (model class, config, dtype on disk, extra)
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SMALL, rope_parameters=LLAMA3), torch.bfloat16, {}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SMALL, tie_word_embeddings=True), torch.bfloat16, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SMALL, head_dim=32), torch.bfloat16, {}),
    "qwen3-moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(**(SMALL | dict(num_hidden_layers=3)), **moe(num_experts=8, mlp_only_layers=[1])),
        torch.bfloat16,
        {},
    ),
    "llama-linear-bias": (
        LlamaForCausalLM,
        LlamaConfig(**TINY, attention_bias=True, rope_parameters=LINEAR),
        torch.bfloat16,
        {},
    ),
    "qwen2-yarn-v4": (
        Qwen2ForCausalLM,
        Qwen2Config(**TINY, rope_parameters=YARN),
        torch.bfloat16,
        dict(config=version4),
    ),
    "qwen3-sharded-fp16": (
        Qwen3ForCausalLM,
        Qwen3Config(**TINY, head_dim=16, tie_word_embeddings=True),
        torch.float16,
        dict(save=dict(max_shard_size="30KB")),
    ),
    "qwen3-moe-step2": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(
            **(TINY | dict(num_hidden_layers=2)),
            **moe(num_experts=4, decoder_sparse_step=2, norm_topk_prob=False),
        ),
        torch.bfloat16,
        {},
    ),
    "mistral": (MistralForCausalLM, MistralConfig(**SMALL, head_dim=24, sliding_window=None), torch.bfloat16, {}),
    "olmo2": (Olmo2ForCausalLM, Olmo2Config(**(SMALL | dict(num_attention_heads=8))), torch.bfloat16, {}),
    "olmo2-bias-tied": (
        Olmo2ForCausalLM,
        Olmo2Config(**TINY, attention_bias=True, tie_word_embeddings=True, rope_parameters=YARN),
        torch.float32,
        {},
    ),
    "llama-gelu": (LlamaForCausalLM, LlamaConfig(**TINY, hidden_act="gelu_pytorch_tanh"), torch.bfloat16, {}),
}


def randomize(model, seed):
    """Logits that differ, norms that are not 1, biases that are not 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, param in model.named_parameters():
            noise = torch.randn(param.shape, generator=generator)
            if "norm" in name:
                param.copy_(1 + 0.2 * noise)
            elif name.endswith("bias"):
                param.copy_(0.2 * noise)
            else:
                param.copy_((0.2 if "embed" in name or "lm_head" in name else 0.12) * noise)


def logits_of(model, tokens):
    with torch.no_grad():
        return model(torch.tensor([tokens]), use_cache=False).logits[0]


def encoded(tensor):
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.int16)
    return base64.b64encode(tensor.contiguous().numpy().tobytes()).decode()


def rounded(values, digits):
    return [round(float(v), digits) for v in values]


def experts_of(model, tokens):
    """None of the choices is near a tie, so that other ways to sum make the same."""
    with torch.no_grad():
        layers = model(torch.tensor([tokens]), use_cache=False, output_router_logits=True).router_logits
    k = model.config.num_experts_per_tok
    chosen = [logits.softmax(-1).topk(k + 1) for logits in layers]
    assert min(float((best.values[:, :-1] - best.values[:, 1:]).min()) for best in chosen) > 1e-6
    return encoded(torch.stack([best.indices[:, :k] for best in chosen], 1).to(torch.uint8))


def case(fp32, bf16, prompt):
    n = len(prompt)
    positions = list(range(n)) if n < 16 else sorted({*range(0, n, 8), n - 2, n - 1})
    tokens, gaps = list(prompt), []
    for _ in range(GREEDY):
        best = logits_of(fp32, tokens)[-1].topk(2)
        tokens.append(int(best.indices[0]))
        gaps.append(best.values[0] - best.values[1])
    every = logits_of(fp32, tokens).double()
    following = torch.tensor(tokens[1:])[:, None]
    logprobs = {
        str(t): rounded((every[:-1] / t).log_softmax(-1).gather(1, following)[:, 0], 7) for t in TEMPERATURES
    }
    return dict(
        prompt=prompt,
        positions=positions,
        logits=encoded(logits_of(fp32, prompt)[positions]),
        bf16=encoded(logits_of(bf16, prompt)[positions]),
        greedy=tokens[n:],
        gaps=rounded(gaps, 5),
        logprobs=logprobs,
        **(dict(experts=experts_of(fp32, tokens)) if hasattr(fp32.config, "num_experts_per_tok") else {}),
    )


def make(name, seed):
    cls, config, dtype, extra = MODELS[name]
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    model = cls(config)
    randomize(model, seed)
    model.to(dtype).save_pretrained(folder, **extra.get("save", {}))
    exact = dict(attn_implementation="eager")
    fp32 = cls.from_pretrained(folder, dtype=torch.float32, **exact).eval()
    bf16 = cls.from_pretrained(folder, dtype=torch.bfloat16, **exact).eval()
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(3, config.vocab_size, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]
    rope = fp32.model.rotary_emb
    golden = dict(
        versions=dict(torch=torch.__version__, transformers=transformers.__version__),
        rope=dict(inv_freq=encoded(rope.inv_freq), scale=float(rope.attention_scaling)),
        cases=[case(fp32, bf16, prompt) for prompt in prompts],
    )
    (folder / "golden.json").write_text(json.dumps(golden, separators=(",", ":")) + "\n")
    if "config" in extra:
        path = folder / "config.json"
        path.write_text(json.dumps(extra["config"](json.loads(path.read_text())), indent=2) + "\n")
    print(name, "gaps", min(min(c["gaps"]) for c in golden["cases"]))


def ropes():
    def one(parameters, **fields):
        config = LlamaConfig(**(SMALL | fields), rope_parameters=dict(parameters))
        rope = LlamaRotaryEmbedding(config)
        return dict(
            config=dict(rope_parameters=parameters, **fields),
            inv_freq=[float(f"{v:.9g}") for v in rope.inv_freq.tolist()],
            scale=float(rope.attention_scaling),
        )

    wide = dict(head_dim=128, max_position_embeddings=131072)
    yarn = dict(rope_type="yarn", rope_theta=1e6, factor=4.0, original_max_position_embeddings=32768)
    llama31 = dict(LLAMA3, original_max_position_embeddings=8192)
    return [
        one(dict(rope_type="default", rope_theta=1e6), **wide),
        one(dict(rope_type="default", rope_theta=10000.0), head_dim=6),
        one(dict(rope_type="linear", rope_theta=10000.0, factor=4.0), **wide),
        one(llama31, **wide),
        one(dict(llama31, factor=32.0), head_dim=64),
        one(dict(llama31, low_freq_factor=2.0), **wide),
        one(dict(llama31, low_freq_factor=0.5, high_freq_factor=8.0), head_dim=64),
        one(yarn, **wide),
        one(dict(yarn, attention_factor=1.25), **wide),
        one(dict(yarn, mscale=0.707, mscale_all_dim=1.2), **wide),
        one(dict(yarn, mscale=0.707), **wide),
        one(dict(yarn, beta_fast=16.0, beta_slow=2.0), **wide),
        one(dict(yarn, truncate=False), **wide),
        one(dict(yarn, factor=None), **wide),
        one(dict(yarn, factor=1.0), head_dim=16),
        one(dict(yarn, rope_theta=10000.0, original_max_position_embeddings=32), head_dim=16),
    ]


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    for i, model_name in enumerate(MODELS):
        if not sys.argv[1:] or model_name in sys.argv[1:]:
            make(model_name, 100 + i)
    if sys.argv[1:]:
        sys.exit()
    lines = ",\n".join(json.dumps(r, separators=(",", ":")) for r in ropes())
    (HERE / "rope.json").write_text(f"[\n{lines}\n]\n")
