"""LoRA adapters made by the real PEFT: tiny models, adapters of random values on them, and PEFT's own logprobs."""

import contextlib
import copy
import warnings

import torch
import transformers
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

from tensors import freeze_imports

# Importing PEFT takes longer than most tests: garbage collection leaves its objects alone.
freeze_imports()

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
# By the name of the adapter. Ranks 1, 8 and 64; every way to name modules.
CASES = {
    "list": dict(r=1, lora_alpha=2, target_modules=["q_proj", "v_proj"]),
    "regex": dict(r=8, lora_alpha=12, use_rslora=True, target_modules=r".*\.(q_proj|up_proj|down_proj)"),
    "all-linear": dict(r=64, lora_alpha=16, target_modules="all-linear"),
    "patterns": dict(
        r=8,
        lora_alpha=8,
        target_modules=ATTENTION + MLP,
        exclude_modules=["v_proj"],
        rank_pattern={"q_proj": 16, r"layers\.1\.self_attn\.o_proj": 3},
        alpha_pattern={"^model.layers.0.self_attn.o_proj": 64, "k_proj": 3},
    ),
    "one layer": dict(r=8, lora_alpha=16, target_modules=["q_proj", "o_proj"], layers_to_transform=[1]),
    "embeddings": dict(r=8, lora_alpha=8, target_modules=["embed_tokens", "lm_head", "q_proj"]),
}
# Fused experts of transformers 5. Gate and up share an A.
EXPERTS = {
    "experts": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    "gate and up": ["mlp.experts.gate_up_proj"],
    "down": ["mlp.experts.down_proj"],
}
CASES_OF_EXPERTS = {
    name: dict(r=4 * (at + 1), lora_alpha=8, use_rslora=at == 1, target_modules=["q_proj"], target_parameters=targets)
    for at, (name, targets) in enumerate(EXPERTS.items())
}


@contextlib.contextmanager
def quiet():
    """Without PEFT's warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def base_of(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def fill(model, seed, size=0.3):
    """Random values for A and B, which PEFT leaves at zero: what the adapter adds is then as large as the rest."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * size)
    return model


def peft_model(base, seed, **fields):
    """A PEFT model over a copy of the base."""
    with quiet():
        return fill(get_peft_model(copy.deepcopy(base), LoraConfig(**fields)), seed).eval()


def logprobs(model, ids):
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits.double()[0, :-1]
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def merged(model):
    return copy.deepcopy(model).merge_and_unload().eval()


def farthest(a, b):
    return (torch.as_tensor(a, dtype=torch.double) - torch.as_tensor(b, dtype=torch.double)).abs().max().item()



__all__ = ["LoraConfig", "get_peft_model_state_dict"]
