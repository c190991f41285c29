"""transformers' results for a model, in float32 and in 16 bits, on the same GPU."""

import gc
import math

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

logging.disable_progress_bar()


class Reference:
    def __init__(self, folder, dtype, device):
        torch.backends.cuda.matmul.allow_tf32 = False
        # Not through host memory, where a large model in float32 would not fit or take a minute.
        place = {} if device == "cpu" else dict(device_map=device)
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager", **place
        ).eval()
        self.device = device

    @torch.inference_mode()
    def logits(self, tokens):
        """[tokens, vocabulary], as the model gives them."""
        return self.model(torch.tensor([tokens], device=self.device), use_cache=False).logits[0]

    @torch.inference_mode()
    def logprobs(self, tokens):
        """Logprobs of tokens 1.., each given all before it; float64 on the host."""
        logits = self.logits(tokens)[:-1].float()
        following = torch.tensor(tokens[1:], device=self.device)[:, None]
        return (
            logits.gather(1, following)[:, 0].double()
            - torch.logsumexp(logits.double() if logits.shape[1] < 4096 else logits, -1).double()
        ).cpu()

    @torch.inference_mode()
    def distribution(self, tokens, experts=None):
        """Logprobs of every id at each position but the last; float64 on the host. `experts`, [tokens - 1, sparse
        layers, experts per token], replaces what the routers choose."""
        hooks = [] if experts is None else self._route(experts.to(self.device))
        try:
            return self.logits(tokens)[:-1].double().log_softmax(-1).cpu()
        finally:
            for hook in hooks:
                hook.remove()

    @torch.inference_mode()
    def experts(self, tokens):
        """The experts of tokens 0.. but the last, [tokens - 1, sparse layers, experts per token], best first."""
        layers = self.model(
            torch.tensor([tokens], device=self.device), use_cache=False, output_router_logits=True
        ).router_logits
        count = self.model.config.num_experts_per_tok
        return torch.stack([logits.float().softmax(-1).topk(count).indices for logits in layers], 1)[:-1].cpu()

    def _route(self, experts):
        # No token comes after the last one, whose experts are not given.
        experts = torch.cat([experts, experts[-1:]])

        def chosen(layer):
            def hook(_module, _inputs, output):
                scores = output[0].float().softmax(-1).gather(1, experts[:, layer])
                if self.model.config.norm_topk_prob:
                    scores = scores / scores.sum(-1, keepdim=True)
                return output[0], scores.to(output[1].dtype), experts[:, layer]

            return hook

        routers = [module for module in self.model.modules() if type(module).__name__.endswith("TopKRouter")]
        assert len(routers) == experts.shape[1], f"{len(routers)} routers for {experts.shape[1]} layers of experts"
        return [router.register_forward_hook(chosen(layer)) for layer, router in enumerate(routers)]

    def close(self):
        del self.model
        gc.collect()
        if self.device != "cpu":
            torch.cuda.empty_cache()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def prompts(seed, lengths, vocabulary):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocabulary, (length,), generator=generator).tolist() for length in lengths]


def mean(values):
    return math.fsum(values) / len(values)
