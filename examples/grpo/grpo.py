"""GRPO in plain torch: models/adder-base learns to add through a running refit server.

    npm start                                        # in another terminal
    python examples/grpo/grpo.py [--transport kept] [--asynchronous] [--out build/grpo]

Each step: refit samples n answers to each sum, with the logprob of each token; right answers and right digits are
rewarded; the advantage of an answer is its reward compared with the other answers to the same sum; one step of policy
gradient; the new weights go to refit. Needs torch and transformers; two CPU cores are enough.
"""

import contextlib
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(HERE.parent / "adder"), str(ROOT / "clients/python")]
import sums  # noqa: E402
from options import arguments  # noqa: E402
from refit import Client, RefitError  # noqa: E402
from report import Report  # noqa: E402
from sender import Sender  # noqa: E402

EOS = 256
LONGEST = 6  # tokens of an answer


@dataclass
class Batch:
    """Samples as tensors: a row for each sample, a column for each token after the first of the row."""

    ids: torch.Tensor  # [rows, columns + 1], prompts and answers, padded on the right
    answer: torch.Tensor  # bool: the token belongs to the answer
    engine: torch.Tensor  # refit's logprob of the token
    step: torch.Tensor  # the step whose weights made the token
    advantage: torch.Tensor
    reward: float  # the part of all samples that is right, also of those that are left out
    request_ids: list  # refit's id of each row


def encoded(a, b):
    """The adder's tokens are bytes."""
    return list(sums.plain(a, b).encode())


def right(output, a, b):
    return output["output_ids"] == [*str(a + b).encode(), EOS]


def rewards_of(output, a, b):
    """One reward for each place of an answer: 1 if the right token is there."""
    wanted, got = [*str(a + b).encode(), EOS], output["output_ids"]
    right = [float(token == other) for token, other in zip(wanted, got)]
    return right + [0.0] * (LONGEST - len(right))


def sample(client, pairs, n, seed):
    """n samples of each sum. Raises RefitError if weights made them that this run has not sent."""
    sampling = [{"n": n, "max_new_tokens": LONGEST, "sampling_seed": seed + n * i} for i in range(len(pairs))]
    outputs = client.generate([encoded(a, b) for a, b in pairs], sampling, return_logprob=True, receipt=True)
    for output in outputs:
        ended = output["meta_info"]["finish_reason"]["type"] != "abort"
        if not ended or not all(span["version"].startswith("step-") for span in output["meta_info"]["weight_versions"]):
            raise RefitError(503, "LOST", "the server ended, or was started again, while it generated", url=client.url)
    return outputs


def batch_of(pairs, outputs, n):
    """Rewards, group advantages, and the samples that can teach something: those with an advantage."""
    rewards = torch.tensor([rewards_of(output, *pairs[i // n]) for i, output in enumerate(outputs)])
    advantages = (rewards.view(-1, n, LONGEST) - rewards.view(-1, n, LONGEST).mean(1, keepdim=True)).view(-1, LONGEST)
    rows = advantages.abs().sum(1).nonzero()[:, 0].tolist()
    columns = max([len(encoded(*pairs[i // n])) + len(outputs[i]["output_ids"]) - 1 for i in rows], default=1)
    batch = Batch(
        ids=torch.full((len(rows), columns + 1), EOS),
        answer=torch.zeros(len(rows), columns, dtype=torch.bool),
        engine=torch.zeros(len(rows), columns),
        step=torch.zeros(len(rows), columns),
        advantage=torch.zeros(len(rows), columns),
        reward=sum(right(output, *pairs[i // n]) for i, output in enumerate(outputs)) / len(outputs),
        request_ids=[outputs[i]["meta_info"]["id"] for i in rows],
    )
    for row, i in enumerate(rows):
        prompt, answer, meta = encoded(*pairs[i // n]), outputs[i]["output_ids"], outputs[i]["meta_info"]
        batch.ids[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        place = slice(len(prompt) - 1, len(prompt) - 1 + len(answer))
        batch.answer[row, place] = True
        batch.advantage[row, place] = advantages[i, : len(answer)]
        batch.engine[row, place] = torch.tensor([entry[0] for entry in meta["output_token_logprobs"]])
        for span in meta["weight_versions"]:
            made_by = int(span["version"].removeprefix("step-"))
            batch.step[row, place.start + span["start"] : place.start + span["end"]] = made_by
    return batch


def logprobs_of(model, ids):
    """The logprob of each token but the first. Padding on the right changes nothing before it."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


def learn(model, optimizer, batch, most_weight, most_norm=1.0):
    """One step of policy gradient. Returns the trainer's logprobs before the step.

    The samples come from refit's policy, which differs a little from the trainer's (other kernels and number formats;
    older weights in an asynchronous run). The ratio of the two probabilities corrects for it, truncated at most_weight:
    E_refit[w A grad log p] = E_trainer[A grad log p] without the truncation, which bounds the variance.
    """
    logprobs = logprobs_of(model, batch.ids)
    weight = (logprobs.detach() - batch.engine).exp().clamp(max=most_weight)
    gain = (weight * batch.advantage * logprobs)[batch.answer].sum() / batch.answer.sum()
    optimizer.zero_grad(set_to_none=True)
    (-gain).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), most_norm)
    optimizer.step()
    return logprobs.detach()


def differences(batch, logprobs, step, most_weight):
    """How far the trainer's logprobs are from refit's, and how old the weights that sampled were."""
    apart = (logprobs - batch.engine)[batch.answer]
    return {
        "staleness": (step - 1 - batch.step[batch.answer]).mean().item(),
        "mismatch": apart.abs().mean().item(),
        "mismatch_max": apart.abs().max().item(),
        "kl": (apart.exp() - 1 - apart).mean().item(),
        "clipped": (apart.exp() > most_weight).float().mean().item(),
    }


def tell_truth(client, batch, logprobs):
    """refit compares the logprobs with its own: GET /truth, /metrics. A server that was started again knows nothing of
    the samples."""
    rows = zip(batch.request_ids, logprobs, batch.answer)
    with contextlib.suppress(RefitError):
        client.measure_truth([{"id": id, "logprobs": row[answer]} for id, row, answer in rows])


def accuracy(client, pairs):
    """The part of the sums that refit answers right, greedily."""
    outputs = client.generate([encoded(a, b) for a, b in pairs], {"temperature": 0, "max_new_tokens": LONGEST})
    return sum(right(output, a, b) for output, (a, b) in zip(outputs, pairs)) / len(pairs)


def train(args):
    """Returns the accuracy on unseen sums before and after."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, attn_implementation="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.rate, weight_decay=0.0, betas=(0.9, 0.99))
    # Adam's first steps have their full length whatever the gradient: the rate rises first. Then it falls to a tenth.
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / args.warm_up) * (1 - 0.9 * min(1, step / args.steps))
    )
    client = Client(args.url, api_key=args.api_key)
    report, sampler = Report(args.out), sums.Sampler(args.seed)
    sender = Sender(client, model, args.transport, args.folder, args.patience, report.note)
    final, unseen = sums.held_out()  # the first are for the result, the others for the curve and the end
    ahead, seeds = ThreadPoolExecutor(1), iter(range(args.seed << 40, 1 << 62, args.prompts * args.samples))

    def rollout():
        pairs = [sampler.three_digits() for _ in range(args.prompts)]
        return batch_of(pairs, sample(client, pairs, args.samples, next(seeds)), args.samples)

    def result_of(future):
        """The future's batch; if that was lost with the server, a new one."""
        tries = iter([future.result])
        return sender.insist(lambda: next(tries, rollout)())

    try:
        sender.insist(lambda: client.wait_ready(args.patience))
        sender.send("step-0")
        before = sender.insist(lambda: accuracy(client, final))
        report.note(f"{before:.1%} of {len(final)} unseen sums are right before the first step")
        future = ahead.submit(rollout)
        for step in range(1, args.steps + 1):
            with report.timed("rollout"):
                batch = result_of(future)
            if args.asynchronous:
                future = ahead.submit(rollout)
            with report.timed("train"):
                rows = len(batch.request_ids)
                logprobs = learn(model, optimizer, batch, args.most_weight) if rows else None
                schedule.step()
                if rows:
                    tell_truth(client, batch, logprobs)
            with report.timed("update"):
                # A rollout that is under way goes on with the new weights.
                sender.send(f"step-{step}", running=args.asynchronous)
            measured = differences(batch, logprobs, step, args.most_weight) if rows else {}
            if step % args.measure == 0 or step == args.steps:
                with report.timed("measure"):
                    measured["accuracy"] = sender.insist(lambda: accuracy(client, unseen))
            report.row(step, reward=batch.reward, **measured)
            if measured.get("accuracy", 0) >= args.target:
                break
            if not args.asynchronous:
                future = ahead.submit(rollout)
        after = sender.insist(lambda: accuracy(client, final))
        report.note(f"{after:.1%} of {len(final)} unseen sums are right after step {step} ({report.seconds:.0f} s)")
        report.end()
        return before, after
    finally:
        ahead.shutdown(wait=False, cancel_futures=True)
        sender.close()


if __name__ == "__main__":
    try:
        train(arguments(__doc__))
    except (RefitError, TimeoutError) as error:
        sys.exit(f"the run ends: {error}")
