"""A plain torch trainer: it changes and saves the policy, refit loads it, and both must agree on every logprob."""

import copy
import json
import urllib.request

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from conftest import ROOT, Server


def post(server, path, body):
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)


def train_step(model, ids, rate):
    """One training step on the likelihood of `ids`. It changes every parameter."""
    loss = model(ids, labels=ids).loss
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= rate * parameter.grad
            parameter.grad = None


def logprobs_of(model, ids):
    with torch.inference_mode():
        logits = model(ids).logits.double()[0, :-1]
    return logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]


@pytest.fixture(scope="module", params=[1, 2], ids=["1", "2"])
def rollout(request, shared_folder):
    """A server in float32; each test sends it all weights."""
    server = Server(
        ROOT / "models/adder-base", "--dtype", "float32", "--tp", request.param, "--model-root", shared_folder
    )
    yield server
    server.stop()


@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_rollout_and_trainer_agree_after_every_step(rollout, shared_folder, tmp_path, saved):
    torch.manual_seed(1)
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(ROOT / "models/adder-base", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "models/adder-base")
    text = "12+345=357 and 99+1=100, says the sheet of sums."
    ids = torch.tensor([tokenizer(text).input_ids])
    for step in range(3):
        train_step(model, ids, 0.05)
        folder = shared_folder / tmp_path.name / f"step_{step}"
        # The trainer's copy is rounded as the saved one before both are compared.
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.to(saved).float())
        copy.deepcopy(model).to(saved).save_pretrained(folder, max_shard_size="300KB")
        assert len(list(folder.glob("*.safetensors"))) > 1, "a sharded checkpoint"
        reply = post(rollout, "/update_weights_from_disk", {"model_path": str(folder), "weight_version": str(step)})
        assert reply["success"] and reply["report"]["missing"] == []
        scored = post(
            rollout,
            "/generate",
            {
                "input_ids": ids[0].tolist(),
                "sampling_params": {"max_new_tokens": 0},
                "return_logprob": True,
                "logprob_start_len": 0,
            },
        )["meta_info"]
        assert scored["weight_version"] == str(step)
        got = torch.tensor([entry[0] for entry in scored["input_token_logprobs"][1:]], dtype=torch.double)
        torch.testing.assert_close(got, logprobs_of(model, ids), atol=1e-4, rtol=0)


def test_greedy_continuations_are_those_of_transformers(serve):
    model = AutoModelForCausalLM.from_pretrained(ROOT / "models/adder", dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "models/adder")
    server = serve(ROOT / "models/adder")
    for prompt in ["12+345=", "999+1=", "7+8=", "404+40="]:
        encoded = tokenizer(prompt, return_tensors="pt")
        expected = model.generate(**encoded, max_new_tokens=8, do_sample=False)[0, encoded.input_ids.shape[1] :]
        got = post(server, "/generate", {"text": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 8}})
        assert got["output_ids"] == expected.tolist()
        assert got["text"] == tokenizer.decode(expected, skip_special_tokens=True)


def test_the_openai_client_talks_to_the_real_engine(serve):
    server = serve(ROOT / "models/adder", "--api-key", "secret", "--served-model-name", "adder")
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="secret")
    assert client.models.list().data[0].id == "adder"
    chat = client.chat.completions.create(
        model="adder",
        messages=[{"role": "user", "content": "What is 605 + 58?"}],
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    )
    assert chat.choices[0].message.content == "663"
    assert chat.choices[0].logprobs.content[0].top_logprobs[0].token == "6"
    streamed = client.completions.create(model="adder", prompt="12+345=", temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed if chunk.choices) == "357"
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=server.url + "/v1", api_key="wrong").models.list()
