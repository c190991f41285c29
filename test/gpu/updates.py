"""Weight updates, and released and resumed memory: afterwards an engine is bit for bit a freshly loaded one."""

import json

import torch
from safetensors.torch import load_file, save_file

import models
from harness import check, test
from machine import cards, device_flags, free_on_card, room, settled, torch_device
from reference import prompts
from server import ROOT, Refused, Server

GOLDENS = ROOT / "test/goldens"
HALF = ["--dtype", "float16", "--max-total-tokens", 2048]


def answers(server, vocabulary, lengths):
    """Checksums, logprobs and samples, one request after another: no result depends on which requests share a step."""
    found = dict(checksums=server.checksums(), scores=[], samples=[], greedy=[])
    for prompt in prompts(23, lengths, vocabulary):
        found["scores"].append(server.score([prompt])[0])
        found["samples"].append(server.generate([prompt], 24, temperature=1, top_p=0.9, sampling_seed=5))
        found["greedy"].append(server.generate([prompt], 24))
    return found


def check_same(got, expected, what):
    for key, values in expected.items():
        if isinstance(values, dict):
            wrong = [name for name in values if got[key].get(name) != values[name]]
            check(
                got[key].keys() == values.keys() and not wrong,
                f"{what}: {len(wrong)} of {len(values)} {key} differ, first {wrong[:3]}",
            )
        for index, (one, other) in enumerate(zip(got[key], values, strict=True)):
            check(one == other, f"{what}: {key} of prompt {index} differ: {str(one)[:200]} and {str(other)[:200]}")


def in_place_is_fresh(options, first, second, vocabulary, lengths, tokens):
    for ranks in [1, 2] + ([4] if cards() >= 4 else []):
        flags, env = device_flags(options, ranks)
        flags += ["--max-total-tokens", tokens]
        with Server(second, *flags, env=env) as server:
            fresh = answers(server, vocabulary, lengths)
        with Server(first, *flags, "--model-root", second.parent, env=env) as server:
            before = answers(server, vocabulary, lengths)
            server.post("/update_weights_from_disk", dict(model_path=str(second), weight_version="second"))
            check(server.get("/get_weight_version")["weight_version"] == "second", "the label did not move")
            check_same(answers(server, vocabulary, lengths), fresh, f"tp {ranks}")
        check(
            before["checksums"] != fresh["checksums"] and before["scores"] != fresh["scores"],
            "the two models are the same: nothing was tested",
        )
        if ranks == 1:
            alone = fresh["checksums"]
        check(fresh["checksums"] == alone, f"checksums of tp {ranks} are not those of tp 1")
    return alone


def small(name):
    def run(options):
        with room(options) as place:
            second = models.reseeded(GOLDENS / name, place / "second", 99)
            alone = in_place_is_fresh(options, GOLDENS / name, second, 320, (2, 40), 2048)
            with Server(second, "--device", "cpu", "--skip-tokenizer-init", "--max-total-tokens", 256) as server:
                check(server.checksums() == alone, "checksums are not those of the CPU")

    return run


for architecture in ["llama", "qwen2", "qwen3", "qwen3-moe"]:
    test(f"update-is-fresh/{architecture}")(small(architecture))


@test("update-is-fresh/real/qwen2.5-1.5b", gpu=True, real=True)
def real_update(options):
    name = "qwen2.5-1.5b"
    with room(options, 2 * models.size(models.tensors(models.REAL[name]))) as place:
        first, second = (models.real(name, place / str(seed), seed, torch_device(options)) for seed in (1, 2))
        in_place_is_fresh(options, first, second, models.REAL[name]["vocab_size"], (2, 700), 8192)


def resident_mb(pid):
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS")) / 1024


@test("sleep/50-rounds")
def rounds(options):
    """Release, resume, update, generate, 50 times: the same answers, and memory that does not grow."""
    on_card = options.device != "cpu"
    with room(options, 0 if options.small else 7e9) as place:
        if options.small or not on_card:
            folders = [models.reseeded(GOLDENS / "qwen3", place / str(seed), seed) for seed in (1, 2)]
            vocabulary, tokens, slack = 320, 2048, 8 << 20
        else:
            folders = [models.real("qwen2.5-1.5b", place / str(seed), seed, torch_device(options)) for seed in (1, 2)]
            vocabulary, tokens, slack = 151936, 65536, 64 << 20
        if on_card:
            torch.cuda.empty_cache()
        flags, env = device_flags(options)
        prompt = prompts(3, (50,), vocabulary)
        with Server(folders[0], *flags, "--max-total-tokens", tokens, "--model-root", place, env=env) as server:
            expected = [server.generate(prompt, 16)]
            server.post("/update_weights_from_disk", dict(model_path=str(folders[1])))
            expected.append(server.generate(prompt, 16))
            check(expected[0] != expected[1], "the two models answer alike: nothing is tested")
            usage = server.get("/get_server_info")["internal_states"][0]["memory_usage"]
            awake = free_on_card() if on_card else 0
            back, free, resident = [], [], []
            for turn in range(50):
                server.post("/release_memory_occupation", {})
                if on_card:
                    back.append(free_on_card() - awake)
                try:
                    server.generate(prompt, 1)
                    raise AssertionError("an engine without memory answered")
                except Refused as error:
                    check(error.status == 503, f"an engine without memory says {error}")
                server.post("/resume_memory_occupation", dict(tags=["weights"]))
                server.post(
                    "/update_weights_from_disk", dict(model_path=str(folders[turn % 2]), weight_version=f"turn-{turn}")
                )
                server.post("/resume_memory_occupation", dict(tags=["kv_cache", "cuda_graph"]))
                check(server.generate(prompt, 16) == expected[turn % 2], f"another answer in turn {turn}")
                free.append(free_on_card() if on_card else 0)
                resident.append(resident_mb(server.process.pid))
    check(
        resident[-1] - resident[9] < 100,
        f"the process grew from {resident[9]:.0f} to {resident[-1]:.0f} MB between turns 10 and 50",
    )
    if not on_card:
        return f"resident {resident[9]:.0f} MB in turn 10, {resident[-1]:.0f} in turn 50"
    occupied = (usage["weight"] + usage["kvcache"]) * 2**30
    check(min(back) >= 0.99 * occupied - slack, f"{min(back) / 1e6:.0f} MB came back of {occupied / 1e6:.0f}")
    check(
        abs(free[-1] - free[4]) <= slack,
        f"free on the card: {free[4] / 1e6:.0f} MB after turn 5, {free[-1] / 1e6:.0f} after turn 50",
    )
    return (
        f"{min(back) / 1e6:.0f} MB back of {occupied / 1e6:.0f}; free {free[4] / 1e6:.0f} MB after turn 5, "
        f"{free[-1] / 1e6:.0f} after turn 50; resident {resident[9]:.0f} MB and {resident[-1]:.0f}"
    )


@test("sleep/weights-kept-by-the-host")
def kept(options):
    """With --enable-weights-cpu-backup weights come back whole."""
    flags, env = device_flags(options)
    prompt = prompts(3, (50,), 320)
    with Server(
        GOLDENS / "qwen3", *flags, "--max-total-tokens", 1024, "--enable-weights-cpu-backup", env=env
    ) as server:
        expected, sums = server.generate(prompt, 16), server.checksums()
        for _ in range(3):
            server.post("/release_memory_occupation", {})
            server.post("/resume_memory_occupation", {})
            check(server.checksums() == sums, "weights are not what they were")
            check(server.generate(prompt, 16) == expected, "another answer after the memory came back")


@test("sleep/wrong-order")
def wrong_order(options):
    """The request is refused, and the engine goes on working."""
    flags, env = device_flags(options)
    prompt = prompts(3, (50,), 320)
    with Server(GOLDENS / "qwen3", *flags, "--max-total-tokens", 1024, "--model-root", GOLDENS, env=env) as server:
        expected = server.generate(prompt, 16)

        def refused(path, body, statuses=(409,)):
            try:
                said = server.post(path, body)
            except Refused as error:
                check(error.status in statuses, f"{path} {body}: {error}")
                return
            raise AssertionError(f"{path} {body} was taken: {said}")

        refused("/resume_memory_occupation", {})
        refused("/release_memory_occupation", dict(tags=["nonsense"]), (400,))
        server.post("/release_memory_occupation", {})
        refused("/release_memory_occupation", {})
        refused("/update_weights_from_disk", dict(model_path=str(GOLDENS / "qwen3")), (409, 503))
        server.post("/resume_memory_occupation", {})
        server.post("/update_weights_from_disk", dict(model_path=str(GOLDENS / "qwen3")))
        settled(lambda: server.metric("refit:weights_torn"), lambda value: value == 0)
        check(server.generate(prompt, 16) == expected, "another answer after the memory came back")


def cast(source, folder, dtype, scale=1.0):
    """The checkpoint with all tensors in `dtype`. A scale gives float32 bits that float16 has to round."""
    folder.mkdir(parents=True)
    config = json.loads((source / "config.json").read_text())
    name = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps({**config, "dtype": name, "torch_dtype": name}))
    tensors = load_file(source / "model.safetensors")
    save_file(
        {key: (value.float() * scale).to(dtype).contiguous() for key, value in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    return folder


def half_is_fresh(name):
    """In float16: an update from a checkpoint of any dtype leaves what torch's cast of it to float16 loads."""

    def run(options):
        with room(options) as place:
            source = models.reseeded(GOLDENS / name, place / "source", 99)
            stored = {
                "float16": cast(source, place / "float16", torch.float16, 1.0007),
                "bfloat16": cast(source, place / "bfloat16", torch.bfloat16),
                "float32": cast(source, place / "float32", torch.float32, 1.0003),
            }
            for ranks in (1, 2):
                flags, env = device_flags(options, ranks)
                flags = [*flags, *HALF]
                for kind, folder in stored.items():
                    own = cast(folder, place / f"{kind}-{ranks}", torch.float16)
                    with Server(own, *flags, env=env) as server:
                        check(server.get("/server_info")["dtype"] == "float16", "the server reports another dtype")
                        fresh = answers(server, 320, (2, 40))
                    with Server(GOLDENS / name, *flags, "--model-root", place, env=env) as server:
                        check(server.checksums() != fresh["checksums"], "the two models are the same")
                        server.post("/update_weights_from_disk", dict(model_path=str(folder), weight_version=kind))
                        check_same(answers(server, 320, (2, 40)), fresh, f"{kind}, tp {ranks}")

    return run


for architecture in ("qwen3", "qwen3-moe"):
    test(f"fp16/update-is-fresh/{architecture}", gpu=True)(half_is_fresh(architecture))


@test("fp16/sleep", gpu=True)
def half_sleep(options):
    """Weights that were kept in host memory, and those that were sent again, are the ones from before."""
    flags, env = device_flags(options)
    with Server(GOLDENS / "qwen3", *flags, *HALF, "--enable-weights-cpu-backup", env=env) as server:
        before = answers(server, 320, (2, 40))
        server.post("/release_memory_occupation", {})
        server.post("/resume_memory_occupation", {})
        check_same(answers(server, 320, (2, 40)), before, "kept weights")
    with Server(GOLDENS / "qwen3", *flags, *HALF, env=env) as server:
        server.post("/release_memory_occupation", {})
        server.post("/resume_memory_occupation", {})
        server.post("/update_weights_from_disk", dict(model_path=str(GOLDENS / "qwen3")))
        check_same(answers(server, 320, (2, 40)), before, "weights that were sent again")
