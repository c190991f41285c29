"""LoRA adapters of the real PEFT: refit's logprobs are those of PEFT's model, and what it cannot compute is refused."""

import pytest
import torch

import peft_adapters
from conftest import Server
from peft_adapters import CASES, CASES_OF_EXPERTS, base_of, farthest, logprobs, merged, peft_model
from python_client import refit

pytestmark = pytest.mark.usefixtures("nothing_left")

FLAGS = ["--dtype", "float32", "--max-total-tokens", 2048, "--skip-tokenizer-init", "--enable-lora"]
# Fewer slots than adapters: some wait in host memory while a batch runs.
FLAGS += ["--max-loras", 4, "--max-lora-rank", 64, "--max-cpu-loras", 12, "--lora-target-modules", "all"]
PROMPTS = [[3, 5, 77, 120, 300, 41, 7], [9, 11, 13, 200, 1, 44, 91, 17, 6, 210], [250, 8, 8, 30, 19, 77]]


class Rollout:
    """A server of a tiny model with adapters, its client, and the same model in torch."""

    def __init__(self, model, ranks, shared):
        self.server = Server(model.folder, *FLAGS, "--tp", ranks, "--model-root", shared)
        self.client, self.base = refit.Client(self.server.url), base_of(model.folder)

    def score(self, prompts, adapters):
        """The logprobs of each prompt's tokens after the first; adapters: a name or None for each prompt."""
        fields = dict(return_logprob=True, logprob_start_len=0, lora_path=adapters)
        outputs = self.client.generate(prompts, dict(max_new_tokens=0), **fields)
        return [[entry[0] for entry in output["meta_info"]["input_token_logprobs"][1:]] for output in outputs]


@pytest.fixture(scope="session")
def rollout_of(model_of, shared_folder):
    made = {}

    def start(kind, ranks=1):
        if (kind, ranks) not in made:
            made[kind, ranks] = Rollout(model_of(kind), ranks, shared_folder)
        return made[kind, ranks]

    yield start
    for rollout in made.values():
        rollout.server.stop()


def cases_of(kind):
    if kind != "qwen3-moe":
        return CASES
    # PEFT takes a text in target_modules apart into its letters for models whose experts are fused.
    return {name: case for name, case in CASES.items() if isinstance(case["target_modules"], list)} | CASES_OF_EXPERTS


@pytest.mark.parametrize(
    "kind, ranks", [("llama", 1), ("qwen2", 1), ("qwen3", 1), ("qwen3", 2), ("qwen3-moe", 1), ("qwen3-moe", 2)]
)
def test_logprobs_are_those_of_peft_alone_and_in_one_batch(rollout_of, shared_folder, kind, ranks):
    rollout = rollout_of(kind, ranks)
    wanted, prompts, names = [], [], []
    for seed, (name, fields) in enumerate(cases_of(kind).items()):
        model = peft_model(rollout.base, seed, **fields)
        folder = shared_folder / f"{kind}-{ranks}-{name.replace(' ', '-')}"
        with pytest.warns(UserWarning) if name == "embeddings" else peft_adapters.quiet():
            model.save_pretrained(folder)
        report = rollout.client.add_adapter(name, folder, transport="file", verify=True)
        assert report["missing_count"] == 0 and not report["is_zero"] and report["rank"] == report_rank(fields)
        # Merging into tied weights changes both: there the unmerged model alone is right.
        whole = model if kind == "qwen2" and name == "embeddings" else merged(model)
        for prompt in PROMPTS[: 1 + seed % 3]:
            expected = logprobs(model, prompt)
            assert farthest(expected, logprobs(whole, prompt)) < 1e-4, "PEFT agrees with itself"
            assert farthest(expected, logprobs(rollout.base, prompt)) > 0.05, "the adapter changes the answer"
            prompts.append(prompt)
            names.append(name)
            wanted.append(expected)
    prompts += PROMPTS
    names += [None] * len(PROMPTS)
    wanted += [logprobs(rollout.base, prompt) for prompt in PROMPTS]
    mixed = rollout.score(prompts, names)
    for name, got, expected in zip(names, mixed, wanted):
        assert farthest(got, expected) < 2e-5, name
    for prompt, name, got in list(zip(prompts, names, mixed))[::4]:
        assert rollout.score([prompt], [name]) == [got], f"{name}: the same bits alone and in the batch"
    for name in cases_of(kind):
        rollout.client.unload_adapter(name)
    with pytest.raises(refit.RefitError, match="never been loaded, or is unloaded"):
        rollout.score(PROMPTS[:1], ["list"])


def report_rank(fields):
    return max(fields["r"], *fields.get("rank_pattern", {}).values(), 0)


REFUSED = {
    "use_dora": dict(use_dora=True),
    "bias": dict(bias="all"),
    "modules_to_save": dict(modules_to_save=["lm_head"]),
    "lora_bias": dict(lora_bias=True),
    "trainable_token_indices": dict(trainable_token_indices=[1, 5]),
    "r": dict(r=65),
}


@pytest.mark.parametrize("field", REFUSED)
def test_what_is_not_computed_is_refused_by_name_and_nothing_changes(rollout_of, shared_folder, field):
    rollout = rollout_of("qwen2" if field == "bias" else "qwen3")
    fields = dict(dict(r=4, target_modules=["q_proj"]), **REFUSED[field])
    model = peft_model(rollout.base, 1, **fields)
    folder = shared_folder / f"refused-{field}"
    model.save_pretrained(folder)
    good = peft_model(rollout.base, 2, r=4, target_modules=["q_proj"])
    before = rollout.client.add_adapter("kept", good)
    for sent in (folder, model):
        with pytest.raises(refit.RefitError) as refused:
            rollout.client.add_adapter("kept", sent)
        assert (refused.value.status, refused.value.code) == (400, "ADAPTER_REFUSED")
        assert ("rank 65" if field == "r" else f"adapter_config.json: {field}: ") in refused.value.message
    held = rollout.client.adapters()
    assert [(one["name"], one["version"], one["digest"]) for one in held] == [
        ("kept", before["version"], before["digest"])
    ]
    rollout.client.unload_adapter("kept")


def test_a_base_update_keeps_adapters(rollout_of):
    rollout = rollout_of("llama")
    model = peft_model(rollout.base, 3, r=8, target_modules=["q_proj", "down_proj"])
    report = rollout.client.add_adapter("kept", model)
    with torch.no_grad():
        for parameter in rollout.base.parameters():
            parameter.mul_(1.25)
    with rollout.client.update(version="next") as update:
        update.add_all(rollout.base)
    again = peft_model(rollout.base, 3, r=8, target_modules=["q_proj", "down_proj"])
    got = rollout.score(PROMPTS, ["kept", None, "kept"])
    for prompt, logits, by in zip(PROMPTS, got, [again, rollout.base, again]):
        assert farthest(logits, logprobs(by, prompt)) < 2e-5
    assert rollout.client.adapters()[0]["digest"] == report["digest"]
    rollout.client.unload_adapter("kept")
