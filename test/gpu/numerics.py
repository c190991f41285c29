"""The engine against transformers: logprobs of given sequences, greedy continuations; one rank against several.

Both are compared with transformers in float32. The engine's error may be twice that of transformers in the same dtype,
and three times for several ranks, whose partial sums are rounded once more.
"""

import json
import math

import torch

import models
from harness import Skip, check, test
from machine import cards, device_flags, free_on_card, layers_that_fit, room, torch_device
from reference import Reference, mean, prompts
from server import ROOT, Server

GOLDENS = ROOT / "test/goldens"
ARCHITECTURES = [
    "llama",
    "qwen2",
    "qwen3",
    "qwen3-moe",
    "llama-linear-bias",
    "qwen2-yarn-v4",
    "qwen3-sharded-fp16",
    "qwen3-moe-step2",
    "mistral",
    "olmo2",
    "olmo2-bias-tied",
]
GREEDY = 32


def allowed(ranks):
    return 2 if ranks == 1 else 3


def check_greedy(exact, prompt, generated, most, typical):
    """Every token is the best one for transformers in float32, given the engine's own tokens before it, or within
    `most` of it; four of five within `typical`. The same holds for their logprobs."""
    tokens, logprobs = generated
    logits = exact.logits(prompt + tokens)[len(prompt) - 1 : -1].float()
    best = logits.max(-1)
    chosen = torch.tensor(tokens, device=logits.device)[:, None]
    behind = (best.values - logits.gather(1, chosen)[:, 0]).cpu()
    off = (torch.tensor(logprobs) - logits.log_softmax(-1).gather(1, chosen)[:, 0].cpu()).abs()
    for what, values in [("is worse than float32's best by", behind), ("has a logprob that is off by", off)]:
        worst, middling = int(values.argmax()), values.quantile(0.8)
        where = (
            f"greedy token {worst} ({tokens[worst]}; float32 says {int(best.indices[worst])}) after a prompt of "
            f"{len(prompt)}"
        )
        check(values[worst] <= most, f"{where} {what} {values[worst]:.4f}, {most:.4f} allowed")
        check(
            middling <= typical,
            f"of the greedy tokens after a prompt of {len(prompt)} one in five {what} more than {middling:.4f}, "
            f"{typical:.4f} allowed",
        )


def errors_of(got, expected):
    """Mean over everything, median of the largest at each position, the largest: of lists of [positions,
    vocabulary]."""
    errors = torch.cat([(one - other).abs() for one, other in zip(got, expected, strict=True)])
    positions = errors.amax(-1)
    return float(errors.mean()), positions.quantile(0.5).item(), positions.max().item()


def small(name, ranks=(1, 2), more_env=None, dtype="bfloat16"):
    groups, more_env = ranks, more_env or {}

    def run(options):
        folder, device = GOLDENS / name, torch_device(options)
        vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
        sequences = prompts(7, (2, 7, 33, 200), vocabulary)
        with (
            Reference(folder, getattr(torch, dtype), device) as rounded,
            Reference(folder, torch.float32, device) as exact,
        ):
            expected = [exact.distribution(sequence) for sequence in sequences]
            theirs = errors_of([rounded.distribution(sequence) for sequence in sequences], expected)
            notes = []
            for ranks in groups:
                flags, env = device_flags(options, ranks)
                with Server(
                    folder, *flags, "--dtype", dtype, "--max-total-tokens", 2048, env={**env, **more_env}
                ) as server:
                    tokens, rows = server.score(sequences, list(range(vocabulary)))
                    generated = server.generate(sequences, GREEDY)
                got = [torch.tensor(row, dtype=torch.float64) for row in rows]
                for sequence, given, row in zip(sequences, tokens, got, strict=True):
                    own = row[torch.arange(len(sequence) - 1), sequence[1:]]
                    check(
                        torch.equal(own, torch.tensor(given, dtype=torch.float64)),
                        "the logprob of a token differs from that of the same id in the list",
                    )
                ours = errors_of(got, expected)
                notes.append(f"tp {ranks} {ours[0]:.4f} / {ours[2]:.3f}")
                check(ours[0] > 0, f"{dtype} rounds, and nothing was")
                for what, mine, other in zip(("mean", "median of the largest per position", "largest"), ours, theirs):
                    check(
                        mine <= allowed(ranks) * other,
                        f"tp {ranks}: {what} error {mine:.5f}, transformers in {dtype} {other:.5f}; per sequence "
                        f"{[errors_of([g], [e]) for g, e in zip(got, expected)]}",
                    )
                for sequence, continued in zip(sequences, generated, strict=True):
                    check_greedy(
                        exact, sequence, continued, 2 * allowed(ranks) * theirs[2], 2 * allowed(ranks) * theirs[1]
                    )
        return f"mean / largest error {', '.join(notes)}; transformers in {dtype} {theirs[0]:.4f} / {theirs[2]:.3f}"

    return run


for architecture in ARCHITECTURES:
    test(f"numerics/{architecture}")(small(architecture))
for architecture in ("llama", "qwen2", "qwen3", "qwen3-moe", "qwen3-sharded-fp16", "olmo2"):
    test(f"fp16/numerics/{architecture}", gpu=True)(small(architecture, dtype="float16"))


CALIBRATION = {}


def real(name, most_layers=1000):
    """Errors of the logprobs of the tokens themselves: mean within the factor, the largest within twice that."""

    def run(options):
        device = torch_device(options)
        config, left = models.REAL[name], free_on_card()
        # The engine's weights and cache stand beside the reference in float32: three times the bytes of bfloat16 in
        # all.
        layers = min(most_layers, layers_that_fit(name, (left - 14e9) / 3))
        if layers < 2:
            raise Skip(f"{left / 1e9:.0f} GB free on the card are too few")
        size = models.size(models.tensors(dict(config, num_hidden_layers=layers)))
        sequences = prompts(11, (2, 17, 300, 513, 1300), config["vocab_size"])
        with room(options, size) as place:
            folder = models.real(name, place / name, 1, device, layers)
            with Reference(folder, torch.bfloat16, device) as rounded:
                half = [rounded.logprobs(sequence) for sequence in sequences]
            with Reference(folder, torch.float32, device) as exact:
                expected = [exact.logprobs(sequence) for sequence in sequences]
                errors = [float(value) for got, right in zip(half, expected) for value in (got - right).abs()]
                theirs, worst = mean(errors), max(errors)
                CALIBRATION[name] = (layers, theirs)
                notes = []
                for ranks in [1, 2] + ([4] if cards() >= 4 else []):
                    flags, env = device_flags(options, ranks)
                    with Server(folder, *flags, "--max-total-tokens", 8192, env=env) as server:
                        got = server.score(sequences)
                        again = [server.score([sequence])[0] for sequence in sequences]
                        generated = server.generate(sequences, GREEDY)
                    for what, scored in [("together", got), ("one by one, from the prefix cache", again)]:
                        ours = [
                            abs(value - float(right))
                            for row, rights in zip(scored, expected)
                            for value, right in zip(row, rights, strict=True)
                        ]
                        check(
                            mean(ours) <= allowed(ranks) * theirs,
                            f"tp {ranks}, {what}: mean error {mean(ours):.5f}, transformers in bfloat16 {theirs:.5f}",
                        )
                        check(
                            max(ours) <= 2 * allowed(ranks) * worst,
                            f"tp {ranks}, {what}: largest error {max(ours):.5f}, transformers in bfloat16 {worst:.5f}",
                        )
                        if what == "together":
                            notes.append(f"tp {ranks} {mean(ours):.5f} / {max(ours):.4f}")
                    for sequence, continued in zip(sequences, generated):
                        check_greedy(
                            exact, sequence, continued, 2 * allowed(ranks) * worst, 8 * allowed(ranks) * theirs
                        )
        cut = "" if layers == config["num_hidden_layers"] else f", {layers} of {config['num_hidden_layers']} layers"
        return f"mean / largest error {', '.join(notes)}; transformers in bfloat16 {theirs:.5f} / {worst:.4f}{cut}"

    return run


test("numerics/real/qwen2.5-1.5b", gpu=True, real=True)(real("qwen2.5-1.5b"))
test("numerics/real/qwen3-8b", gpu=True, real=True)(real("qwen3-8b"))
test("numerics/real/qwen3-30b-a3b", gpu=True, real=True)(real("qwen3-30b-a3b", most_layers=12))


@test("numerics/whole/qwen3-30b-a3b", gpu=True, real=True)
def whole(options):
    """All layers; float32 would not fit on the GPU, so it is held against transformers in bfloat16.

    The error of that grows as the root of the number of layers, measured by the test of fewer layers; the engine may be
    twice as far from the truth, so the two may be three times as far apart.
    """
    name, device = "qwen3-30b-a3b", torch_device(options)
    config = models.REAL[name]
    size = models.size(models.tensors(config))
    if not options.whole:
        raise Skip("--whole was not given (61 GB of weights)")
    if name not in CALIBRATION:
        raise Skip("numerics/real/qwen3-30b-a3b has to run before it")
    if free_on_card() < 1.25 * size:
        raise Skip(f"{free_on_card() / 1e9:.0f} GB free on the card, {1.25 * size / 1e9:.0f} needed")
    layers, theirs = CALIBRATION[name]
    limit = 3 * theirs * math.sqrt(config["num_hidden_layers"] / layers)
    sequences = prompts(13, (2, 17, 300, 513), config["vocab_size"])
    with room(options, size) as place:
        folder = models.real(name, place / name, 1, device)
        torch.cuda.empty_cache()
        with Reference(folder, torch.bfloat16, device) as rounded:
            expected = [rounded.logprobs(sequence) for sequence in sequences]
        flags, env = device_flags(options)
        with Server(folder, *flags, "--max-total-tokens", 4096, env=env) as server:
            got, start_s = server.score(sequences), server.start_s
    apart = mean(
        [
            abs(value - float(other))
            for row, others in zip(got, expected)
            for value, other in zip(row, others, strict=True)
        ]
    )
    check(apart <= limit, f"{apart:.5f} apart in the mean, {limit:.5f} allowed")
    return f"{apart:.5f} apart in the mean, {limit:.5f} allowed; ready after {start_s:.1f} s"
