"""Trains a LoRA adapter of the bundled base model with PEFT, and sends it to a running server after each step. The
server goes on generating: its next requests use the new version.

    npm start -- --enable-lora              # in another terminal
    python examples/adder/adapter.py [--url http://127.0.0.1:30000] [--steps 60]

Needs torch, transformers and peft; one CPU core is enough.
"""

import argparse
import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "clients/python")]
import adder_tokenizer  # noqa: E402
import sums  # noqa: E402
from refit import Client  # noqa: E402
from train import answer_loss, make_batch  # noqa: E402

MODEL = HERE.parents[1] / "models/adder-base"


def right_answers(client, pairs, adapter=None) -> int:
    """How many of the sums the server answers right, with an adapter or with the base model."""
    prompts = [sums.plain(a, b) for a, b in pairs]
    outputs = client.generate(prompts, {"temperature": 0, "max_new_tokens": 6}, lora_path=adapter)
    return sum(output["text"] == str(a + b) for output, (a, b) in zip(outputs, pairs))


def main(url: str, steps: int, rank: int = 16, rate: float = 2e-3) -> tuple[int, int]:
    """Returns the right answers of 100 sums by the base model and by the last version of the adapter."""
    torch.manual_seed(1)
    client, tokenizer, sampler = Client(url), adder_tokenizer.build(), sums.Sampler(1)
    judged = sums.held_out()[0][:100]
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32), config)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)

    before = right_answers(client, judged)
    print(f"base model: {before} of {len(judged)}")
    for step in range(1, steps + 1):
        batch = make_batch(tokenizer, [sampler.plain() for _ in range(128)])
        loss = answer_loss(model.get_base_model(), *batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        # verify: the digest of what every rank of the server holds is that of the adapter here.
        report = client.add_adapter("adder", model, verify=True)
        if step % 20 == 0 or step == steps:
            right = right_answers(client, judged, "adder")
            print(f"step {step}: version {report['version']}, loss {loss.item():.3f}, {right} of {len(judged)}")
    return before, right


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rate", type=float, default=2e-3)
    arguments = parser.parse_args()
    main(arguments.url, arguments.steps, arguments.rank, arguments.rate)
