"""Adapters that the real PEFT makes for trainers to send, and the logprobs that a server has to give under them."""

from engines import GOLDENS
from peft_adapters import ATTENTION, MLP, base_of, farthest, fill, logprobs, peft_model

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [40, 3, 17], [21, 22, 23, 24, 25, 26, 27, 28, 29, 30]]
# float32 on both sides; the order of additions differs.
CLOSE = 2e-3
FLAGS = ("--enable-lora", "--dtype", "float32")


def adapted(kind, seed, rank=8):
    """A PEFT model whose adapter changes the output well beyond CLOSE."""
    model = peft_model(base_of(GOLDENS / kind), seed, r=rank, lora_alpha=16, target_modules=ATTENTION + MLP)
    return fill(model, seed, size=0.08)


def check(engine, name, model):
    """The engine gives PEFT's logprobs under the adapter of that name."""
    body = dict(
        input_ids=PROMPTS,
        lora_path=name,
        return_logprob=True,
        logprob_start_len=0,
        sampling_params=dict(max_new_tokens=1, temperature=0, ignore_eos=True),
    )
    for prompt, reply in zip(PROMPTS, engine.post("/generate", body), strict=True):
        found = [pair[0] for pair in reply["meta_info"]["input_token_logprobs"][1:]]
        assert farthest(found, logprobs(model, prompt)) < CLOSE, name
        assert reply["meta_info"]["lora"]["name"] == name
