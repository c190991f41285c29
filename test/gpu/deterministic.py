"""--deterministic: a request's tokens and logprobs are the same bits alone and among others, however its prompt is cut
into steps, from the prefix cache, with graphs and without, with guesses, after an update as after a fresh load, and on
several ranks as on one."""

import concurrent.futures

import models
from harness import check, test
from machine import device_flags, room, torch_device
from reference import prompts
from server import ROOT, Server

GOLDENS = ROOT / "test/goldens"
OUTPUT = 24


def ask(server, prompt, seed):
    """Output ids and the logprobs of prompt and output."""
    body = dict(
        input_ids=[prompt],
        sampling_params=dict(max_new_tokens=OUTPUT, temperature=0.8, top_p=0.95, sampling_seed=seed, ignore_eos=True),
        return_logprob=True,
        logprob_start_len=0,
    )
    reply = server.post("/generate", body, timeout=600)[0]
    meta = reply["meta_info"]
    return reply["output_ids"], meta["input_token_logprobs"], meta["output_token_logprobs"]


def alone(server, asked):
    server.post("/flush_cache")
    return [ask(server, prompt, seed) for seed, prompt in enumerate(asked)]


def among_others(server, asked, vocabulary):
    """All at once, each twice, with other requests between them; the order is not the same twice."""
    others = prompts(77, [3 + 37 * i % 450 for i in range(24)], vocabulary)
    work = [(seed, prompt) for seed, prompt in enumerate(asked)] * 2
    work[3:3] = [(None, prompt) for prompt in others]
    server.post("/flush_cache")
    with concurrent.futures.ThreadPoolExecutor(len(work)) as pool:
        replies = list(pool.map(lambda one: (one[0], ask(server, one[1], 7 if one[0] is None else one[0])), work))
    return [reply for seed, reply in replies if seed is not None]


def differing(got, expected):
    return sum(one != expected[at % len(expected)] for at, one in enumerate(got))


def check_same(got, expected, what):
    count = differing(got, expected)
    check(count == 0, f"{what}: {count} of {len(got)} requests have other tokens or logprobs than alone")


def compare(options, folder, second, vocabulary, lengths, ranks=1, control=False):
    def on(count):
        flags, env = device_flags(options, count)
        return [*flags, "--dtype", "bfloat16", "--max-total-tokens", 32768], env

    flags, env = on(1)
    asked = prompts(41, lengths, vocabulary)
    # The last prompts begin as the one before, so that decoding requests share pages.
    asked += [asked[-1][:-7] + prompts(42 + i, [7], vocabulary)[0] for i in range(2)]
    with Server(folder, *flags, "--deterministic", env=env) as server:
        expected = alone(server, asked)
        check_same(alone(server, asked), expected, "again")
        check_same(among_others(server, asked, vocabulary), expected, "among others")
        again = [ask(server, prompt, seed) for seed, prompt in enumerate(asked)]
        check_same(again, expected, "from the prefix cache")
    changed = [
        *("--max-prefill-tokens", 48, "--disable-cuda-graph", "--speculative", "siblings"),
        *("--disable-adaptive-speculation", "--model-root", folder.parent),
    ]
    many, many_env = on(ranks)
    with Server(second, *many, "--deterministic", *changed, env=many_env) as server:
        check(differing(alone(server, asked), expected) > 0, "both models give the same")
        server.post("/update_weights_from_disk", dict(model_path=str(folder), weight_version="first"))
        check_same(alone(server, asked), expected, "short steps, no graphs, guesses, after an update")
        check_same(among_others(server, asked, vocabulary), expected, "the same among others")
    if ranks > 1:
        with Server(folder, *many, "--deterministic", env=many_env) as server:
            check_same(among_others(server, asked, vocabulary), expected, f"{ranks} ranks with graphs")
    if not control:
        return
    with Server(folder, *flags, env=env) as server:
        plain = alone(server, asked)
        count = differing(among_others(server, asked, vocabulary), plain)
        print(f"without --deterministic {count} of {2 * len(asked)} differ among others", flush=True)
        check(count > 0, "without --deterministic nothing differs, so nothing was tested")


def small(name, ranks=1):
    def run(options):
        with room(options) as place:
            first, second = (models.reseeded(GOLDENS / name, place / str(seed), seed) for seed in (5, 99))
            compare(options, first, second, 320, (2, 40, 131, 210), ranks)

    return run


for architecture in ["llama", "qwen2", "qwen3", "qwen3-moe", "olmo2"]:
    test(f"deterministic/{architecture}")(small(architecture))
for architecture in ["qwen3", "qwen3-moe", "olmo2"]:
    test(f"deterministic/{architecture}/tp-2")(small(architecture, 2))


def real(name, layers):
    def run(options):
        config = dict(models.REAL[name], num_hidden_layers=layers)
        with room(options, 2 * models.size(models.tensors(config))) as place:
            first, second = (
                models.real(name, place / str(seed), seed, torch_device(options), layers) for seed in (1, 2)
            )
            compare(options, first, second, config["vocab_size"], (5, 300, 1100, 2000), control=True)

    return run


test("deterministic/real/qwen3-8b", gpu=True, real=True)(real("qwen3-8b", 6))
test("deterministic/real/qwen3-30b-a3b", gpu=True, real=True)(real("qwen3-30b-a3b", 3))
