"""Mismatch and timings on a GPU: a real architecture with random weights, every transport in turn.

    python3 examples/grpo/on_gpu.py [--device cuda] [--size small] [--transports handles,kept,...]

For each transport: a server of its own, some steps of grpo.py's loop (sample, one step of policy gradient with random
rewards, send), and a row of a table: how far the trainer's logprobs are from refit's, and how long it took.
Needs torch and transformers, and no network: the checkpoint is made on the spot. A GPU is shared by trainer and server,
so the transport group uses gloo there unless --trainer-device names another GPU (then NCCL).
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT / "clients/python"), str(ROOT / "test/gpu")]
from grpo import logprobs_of  # noqa: E402
from refit import Client  # noqa: E402
from sender import TRANSPORTS, Sender  # noqa: E402
from server import Server  # noqa: E402

# hidden, layers, heads, key-value heads, head, MLP, vocabulary: the last is Qwen3-0.6B's shape.
SIZES = {
    "tiny": (64, 2, 4, 2, 16, 128, 300),
    "small": (512, 8, 8, 4, 64, 1536, 32000),
    "0.6b": (1024, 28, 16, 8, 128, 3072, 151936),
}


def make_checkpoint(folder, size):
    hidden, layers, heads, pairs, head, mlp, vocabulary = SIZES[size]
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=pairs,
        head_dim=head,
        intermediate_size=mlp,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(1)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


class Step:
    """Samples, learns and sends, and keeps the numbers of each step."""

    def __init__(self, args, client, sender, model):
        self.args, self.client, self.sender, self.model = args, client, sender, model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=args.rate)
        self.random = torch.Generator().manual_seed(1)
        self.apart, self.seconds, self.truth = [], {"rollout": [], "train": [], "update": []}, None

    def timed(self, phase, call):
        began = time.monotonic()
        result = call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[phase].append(time.monotonic() - began)
        return result

    def run(self, step):
        args = self.args
        shape = (args.prompts, args.prompt_tokens)
        prompts = torch.randint(3, self.model.config.vocab_size, shape, generator=self.random)
        sampling = {"max_new_tokens": args.tokens, "ignore_eos": True, "n": args.samples}
        outputs = self.timed(
            "rollout", lambda: self.client.generate(prompts, sampling, return_logprob=True, receipt=True)
        )
        self.timed("train", lambda: self.learn(prompts, outputs))
        self.timed("update", lambda: self.sender.send(f"step-{step}"))

    def learn(self, prompts, outputs):
        device = next(self.model.parameters()).device
        rows = prompts.repeat_interleave(self.args.samples, 0)
        ids = torch.cat([rows, torch.tensor([output["output_ids"] for output in outputs])], 1).to(device)
        engine = torch.tensor([[entry[0] for entry in out["meta_info"]["output_token_logprobs"]] for out in outputs])
        rewards = torch.randn(len(outputs), generator=self.random)
        claims = []
        self.optimizer.zero_grad(set_to_none=True)
        for at in range(0, len(outputs), self.args.samples):
            part = slice(at, at + self.args.samples)
            logprobs = logprobs_of(self.model, ids[part])[:, -self.args.tokens :]
            (-(rewards[part, None].to(device) * logprobs).mean()).backward()
            own = logprobs.detach().float().cpu()
            self.apart.append((own - engine[part]).abs())
            claims += [{"id": out["meta_info"]["id"], "logprobs": row} for out, row in zip(outputs[part], own)]
        self.optimizer.step()
        self.truth = self.client.measure_truth(claims)


def measure(args, folder, transport, shared):
    flags = ["--device", args.device, "--skip-tokenizer-init", "--model-root", shared, *args.flag]
    with Server(folder, *flags) as server:
        client = Client(server.url)
        place = args.trainer_device or args.device
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(place)
        sender = Sender(client, model, transport, folder=shared, patience=60)
        if transport == "group" and args.trainer_device is None:
            sender.transport.group.backend = "gloo"
        step = Step(args, client, sender, model)
        sender.send("step-0")
        for index in range(1, args.steps + 1):
            step.run(index)
        report = next(iter(sender.reports[-1].values()), {}) if sender.reports[-1] else {}
        sender.close()
        apart = torch.cat([part.flatten() for part in step.apart])
        middle = {phase: statistics.median(values) for phase, values in step.seconds.items()}
        size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        return dict(
            transport=transport,
            **{f"{phase}_ms": round(1000 * value, 2) for phase, value in middle.items()},
            gb_per_s=round(size / 1e9 / middle["update"], 2),
            mismatch=round(apart.mean().item(), 6),
            mismatch_max=round(apart.max().item(), 4),
            tokens_per_s=round(args.prompts * args.samples * args.tokens / middle["rollout"]),
            truth={name: step.truth[name] for name in ("mean", "p99", "max", "kl", "clipped")},
            report=report,
        )


def main(given=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--trainer-device", help="such as cuda:1; default: the server's")
    parser.add_argument("--size", choices=SIZES, help="default: 0.6b on a GPU, tiny on the CPU")
    parser.add_argument("--model", help="the folder of a checkpoint instead")
    parser.add_argument("--transports", default=",".join(TRANSPORTS))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8, help="of each prompt")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--rate", type=float, default=0.01)
    parser.add_argument("--flag", action="append", default=[], help="one more of refit serve, as --flag=--tp=2")
    parser.add_argument("--json", type=Path, help="file for the rows")
    args = parser.parse_args(given)
    with tempfile.TemporaryDirectory(prefix="refit-grpo-") as shared:
        folder = args.model
        if folder is None:
            folder = str(Path(shared) / "checkpoint")
            make_checkpoint(folder, args.size or ("0.6b" if args.device == "cuda" else "tiny"))
        rows = []
        for transport in args.transports.split(","):
            rows.append(measure(args, folder, transport, shared))
            print(json.dumps(rows[-1]), flush=True)
    columns = [name for name in rows[0] if name not in ("truth", "report")]
    print("\n| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for row in rows:
        print("| " + " | ".join(str(row[name]) for name in columns) + " |")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")
    return rows


if __name__ == "__main__":
    main()
