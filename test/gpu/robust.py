"""Robustness of a server: clients that leave, another process on the GPU, a GPU that fails, impossible flags."""

import concurrent.futures
import http.client
import json
import random
import subprocess
import time

import torch

import models
from harness import check, test
from machine import cards, device_flags, free_on_card, room, settled, torch_device
from reference import prompts
from server import ROOT, Refused, Server, node

GOLDENS = ROOT / "test/goldens"


@test("robust/1000-requests-with-aborts")
def aborts(options):
    """Clients that wait, that leave in the middle of a stream, and that abort by id. Afterwards every page must be
    free."""
    flags, env = device_flags(options)
    tokens, vocabulary, seed = 4096, 320, options.seed
    with Server(
        GOLDENS / "llama",
        *flags,
        "--max-total-tokens",
        tokens,
        "--context-length",
        512,
        "--max-running-requests",
        48,
        env=env,
    ) as server:

        def one(number):
            dice = random.Random(seed * 1000003 + number)
            prompt = [dice.randrange(3, vocabulary) for _ in range(dice.choice([1, 5, 16, 33, 200]))]
            sampling = dict(
                max_new_tokens=dice.choice([1, 20, 200]), temperature=1, ignore_eos=True, sampling_seed=number
            )
            body = dict(
                input_ids=prompt,
                sampling_params=sampling,
                rid=f"request-{number}",
                stream=True,
                return_logprob=dice.random() < 0.3,
            )
            fate = dice.choice(["wait", "wait", "leave", "abort"])
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
            connection.request("POST", "/generate", json.dumps(body), {"content-type": "application/json"})
            reply = connection.getresponse()
            check(
                reply.status == 200,
                f"request {number}: {reply.status} {reply.read()[:300] if reply.status != 200 else ''}",
            )
            if fate == "wait":
                text = reply.read().decode()
                check(text.rstrip().endswith("data: [DONE]"), f"request {number} ended with {text[-300:]}")
            elif fate == "leave":
                reply.read1(dice.choice([1, 200, 2000]))
            else:
                reply.read1(1)
                server.post("/abort_request", dict(rid=f"request-{number}"))
                reply.read()
            connection.close()
            return fate

        with concurrent.futures.ThreadPoolExecutor(64) as pool:
            fates = list(pool.map(one, range(1000)))
        idle = settled(lambda: server.get("/v1/loads")["loads"][0], lambda load: load["num_total_reqs"] == 0)
        check(idle["num_total_reqs"] == 0, f"requests are left: {idle}")
        check(idle["num_used_tokens"] == 0, f"pages are held by nobody's requests: {idle}")
        server.post("/flush_cache")
        # A cache that has lost pages holds fewer requests of full length than at first.
        full = tokens // 512
        results = server.generate(prompts(1, (500,) * full, vocabulary), 11)
        check(all(len(ids) == 11 for ids, _ in results), f"{full} requests that fill the cache did not all end")
        before = server.metric("refit:num_preemptions_total")
        server.post("/flush_cache")
        server.generate(prompts(2, (500,) * full, vocabulary), 11)
        check(
            server.metric("refit:num_preemptions_total") == before,
            "requests that fit had to give way: pages are missing",
        )
    return f"{fates.count('leave')} left, {fates.count('abort')} aborted, seed {seed}"


@test("robust/two-servers-on-one-gpu")
def two_servers(options):
    flags, env = device_flags(options)
    flags += ["--max-total-tokens", 2048, "--model-root", GOLDENS]
    sequences = prompts(5, (3, 60, 200), 320)
    with Server(GOLDENS / "qwen3", *flags, env=env) as one:
        alone = one.generate(sequences[:1], 64)
        with Server(GOLDENS / "qwen3", *flags, env=env) as other, concurrent.futures.ThreadPoolExecutor(4) as pool:
            work = [pool.submit(server.generate, sequences[:1], 64) for _ in range(20) for server in (one, other)]
            other.post("/update_weights_from_disk", dict(model_path=str(GOLDENS / "qwen3")))
            for done in work:
                check(done.result()[0][0] == alone[0][0], "two servers with the same weights do not answer alike")
        check(
            one.generate(sequences[:1], 64)[0][0] == alone[0][0],
            "the first server answers otherwise once the second has gone",
        )


@test("robust/first-steps", gpu=True)
def first_steps(options):
    """Steps of new sizes, on ranks that wait for each other, because other servers use the same GPUs and processors."""
    flags, env = device_flags(options, 2)
    flags += ["--max-total-tokens", 2048, "--watchdog-timeout", 20]
    sequences = prompts(7, (2, 40, 77, 130, 333), 320)

    def one(number):
        with Server(GOLDENS / ["llama", "qwen2", "qwen3", "qwen3-moe"][number % 4], *flags, env=env) as server:
            return [server.score([sequence]) for sequence in sequences]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        scores = list(pool.map(one, range(16)))
    check(all(scores[number] == scores[number % 4] for number in range(16)), "servers of one model do not score alike")


@test("robust/memory-fraction", gpu=True)
def memory_fraction(options):
    """Two servers that each size their own cache, one after the other, share the GPU."""
    flags, env = device_flags(options)
    before = free_on_card()
    with Server(GOLDENS / "qwen3", *flags, "--mem-fraction", 0.3, "--max-running-requests", 4096, env=env) as one:
        taken = before - free_on_card()
        with Server(GOLDENS / "qwen3", *flags, "--mem-fraction", 0.3, "--max-running-requests", 4096, env=env) as other:
            for server in (one, other):
                check(server.generate(prompts(1, (20,), 320), 4)[0][0] != [], "no answer")
    left = settled(free_on_card, lambda free: free >= before - (64 << 20))
    check(left >= before - (64 << 20), f"{(before - left) / 1e6:.0f} MB of the card were not given back")
    check(taken <= 0.35 * before + 2e9, f"--mem-fraction 0.3 of {before / 1e9:.0f} GB free took {taken / 1e9:.0f}")
    return f"--mem-fraction 0.3 of {before / 1e9:.1f} GB took {taken / 1e9:.1f}"


def dies(options, fault, ranks, limit_s, *more, more_env=None):
    flags, env = device_flags(options, ranks)
    server = Server(
        GOLDENS / "qwen3",
        *flags,
        *more,
        "--max-total-tokens",
        1024,
        env={**env, **(more_env or {}), "REFIT_CUDA_FAULT": fault},
    )
    try:
        began = time.monotonic()
        body = dict(
            input_ids=[5, 6, 7],
            sampling_params=dict(max_new_tokens=400, ignore_eos=True, temperature=0),
            rid="the-victim",
        )
        try:
            said = server.post("/generate", body, timeout=limit_s + 30)
            raise AssertionError(f"a request on a broken card was answered: {str(said)[:300]}")
        except (OSError, http.client.HTTPException, Refused) as error:
            reply = str(error)
        try:
            code = server.process.wait(limit_s + 10)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"the process lives on, {limit_s + 10} s after its request failed with {reply}:\n{server.tail()}"
            ) from None
        seconds = time.monotonic() - began
        log = server.text()
        check(code != 0, "exit code 0")
        check(code > 0, f"ended by signal {-code}:\n{server.tail()}")
        check(
            seconds <= limit_s,
            f"it took {seconds:.1f} s from the request to the end; {limit_s} allowed:\n{server.tail()}",
        )
        check("the-victim" in log, f"the log does not name the request:\n{server.tail()}")
        check("layers." in log, f"the log does not name the operation:\n{server.tail()}")
        return f"{fault} on tp {ranks}: exit code {code} after {seconds:.2f} s"
    finally:
        server.kill()


@test("robust/illegal-address", gpu=True)
def illegal(options):
    """A sticky error of a GPU ends the process within a second, with operation and request in the log."""
    # The first steps may load kernels; the tenth runs at full speed.
    return "; ".join(
        dies(options, fault, ranks, 1.5)
        for fault, ranks in [("illegal:10", 1), ("illegal:10:0", 2), ("illegal:10:1", 2)]
    )


@test("robust/stuck-gpu", gpu=True)
def stuck(options):
    """The watchdog reports a kernel that never ends, and ends the process."""
    return "; ".join(
        dies(options, fault, ranks, 3 + 3, "--watchdog-timeout", 3)
        for fault, ranks in [("hang:10", 1), ("hang:10:1", 2)]
    )


def uuids():
    """The UUIDs of the visible GPUs."""
    return [f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in range(torch.cuda.device_count())]


@test("robust/gpu-by-uuid", gpu=True)
def by_uuid(options):
    known = uuids()
    uuid = known[-1]
    flags, _ = device_flags(options)
    listed = subprocess.run([node(), ROOT / "bin/refit.js", "devices"], capture_output=True, text=True)
    check(
        listed.returncode == 0 and all(one in listed.stdout for one in known),
        f"refit devices does not list {known}:\n{listed.stdout}{listed.stderr}",
    )
    with Server(GOLDENS / "qwen3", *flags, "--max-total-tokens", 1024, env=dict(CUDA_VISIBLE_DEVICES=uuid)) as server:
        check(server.generate([[5, 6, 7]], 4)[0][0] != [], "no answer")
        users = subprocess.run(
            ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid", "--format=csv,noheader"], capture_output=True, text=True
        ).stdout
    return f"{uuid}; nvidia-smi lists {len(users.splitlines())} users of cards"


@test("robust/bad-input")
def bad_input(options):
    """Each ends at once with exit code 2 or 1, without a stack trace, and with a message that names the cause and the
    fix."""
    on_card = options.device != "cpu"
    count = cards() if on_card else 0
    cases = [
        (["--device", "tpu"], {}, "tpu"),
        (["--device", options.device, "--tp", 3], {"REFIT_CUDA_SHARE_CARD": "1"}, "3"),
    ]
    if on_card:
        cases += [
            (["--device", "cuda:99"], {}, "99"),
            (["--device", "cuda", "--dtype", "float32"], {}, "bfloat16 or float16"),
            (["--device", "cuda", "--tp", 2 * max(1, count)], {}, "--tp"),
            (
                ["--device", "cuda"],
                {"CUDA_VISIBLE_DEVICES": "GPU-00000000-0000-0000-0000-000000000000"},
                "CUDA_VISIBLE_DEVICES",
            ),
            (["--device", "cuda"], {"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES"),
            (["--device", "cuda", "--base-gpu-id", count], {}, "there is no GPU"),
            (["--device", "cuda", "--max-total-tokens", 2000000000], {}, "--max-total-tokens"),
            (["--device", "cuda"], {"REFIT_CUDA_LIBRARY": "/nowhere/librefit_cuda.so"}, "/nowhere/librefit_cuda.so"),
        ]
    else:
        cases += [(["--device", "cuda"], {}, "cuda")]
    problems = []
    for flags, env, expected in cases:
        what = " ".join(map(str, [*(f"{key}={value}" for key, value in env.items()), *flags]))
        try:
            with Server(GOLDENS / "qwen3", "--skip-tokenizer-init", *flags, env=env, wait_s=60):
                problems.append(f"{what}: it started")
        except RuntimeError as error:
            said = str(error)
            # The log before it repeats the flags.
            sentence = " ".join(line for line in said.splitlines() if not line.startswith("{"))
            print(f"  {what}\n    {sentence[:500]}", flush=True)
            if expected not in sentence:
                problems.append(f"{what}: nothing about {expected} in {sentence[:300]}")
            if "    at " in said:
                problems.append(f"{what}: a stack trace: {said[-600:]}")
            if "ended with -" in said or "was not ready" in said:
                problems.append(f"{what}: {said[:200]}")
    check(not problems, "\n".join(problems))
    return f"{len(cases)} cases"


@test("robust/no-cublaslt", gpu=True)
def own_kernels(options):
    """Without cuBLASLt the engine computes with its own kernels, and reports it."""
    flags, env = device_flags(options)
    sequences = prompts(5, (3, 60, 200), 320)
    with Server(GOLDENS / "qwen3", *flags, "--max-total-tokens", 2048, env=env) as server:
        expected = server.score(sequences)
    with Server(GOLDENS / "qwen3", *flags, "--max-total-tokens", 2048, env={**env, "REFIT_CUBLASLT": "off"}) as server:
        got = server.score(sequences)
    worst = max(abs(a - b) for one, other in zip(got, expected) for a, b in zip(one, other, strict=True))
    check(worst < 0.1, f"logprobs are {worst:.4f} apart")
    return f"at most {worst:.4f} apart"


@test("robust/gpu-full", gpu=True, real=True)
def card_full(options):
    """A model that does not fit is refused with numbers, before anything hangs."""
    flags, env = device_flags(options)
    with room(options, models.size(models.tensors(models.REAL["qwen2.5-1.5b"]))) as place:
        folder = models.real("qwen2.5-1.5b", place / "model", 1, torch_device(options))
        torch.cuda.empty_cache()
        held = torch.empty(free_on_card() - (1 << 30), dtype=torch.uint8, device="cuda:0")
        try:
            with Server(folder, *flags, env=env, wait_s=60):
                raise AssertionError("3 GB of weights found room in 1 GiB")
        except RuntimeError as error:
            said = str(error)
            check("GB" in said or "MB" in said or "GiB" in said or "MiB" in said, f"no numbers: {said[-400:]}")
            check("ended with -" not in said and "was not ready" not in said, said[:300])
            return said.splitlines()[-1][:200]
        finally:
            del held
            torch.cuda.empty_cache()
