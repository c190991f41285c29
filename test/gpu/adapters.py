"""LoRA adapters on a GPU: numerics against merged weights in transformers, versions under load, handles, memory."""

import base64
import concurrent.futures
import contextlib
import io
import json

import torch

import adapter_files
from harness import check, test
from machine import device_flags, free_on_card, room, torch_device
from numerics import GOLDENS, allowed, errors_of
from reference import Reference, prompts
from routed import read_all
from server import Refused, Server

FLAGS = ["--enable-lora", "--max-loras", 3, "--max-lora-rank", 32, "--max-total-tokens", 4096]


def load(server, name, folder, **more):
    return server.post("/load_lora_adapter", dict(lora_name=name, lora_path=str(folder), **more))


def score(server, sequences, name, ids, **more):
    """As Server.score with ids, with an adapter (None: the base model), and the replies."""
    body = dict(
        input_ids=sequences,
        sampling_params=dict(max_new_tokens=0),
        return_logprob=True,
        logprob_start_len=0,
        token_ids_logprob=[ids] * len(sequences),
        lora_path=name,
        **more,
    )
    replies = server.post("/generate", body)
    return [
        torch.tensor(
            [[entry[0] for entry in row] for row in reply["meta_info"]["input_token_ids_logprobs"][1:]],
            dtype=torch.float64,
        )
        for reply in replies
    ], replies


class Merged:
    """transformers with merged weights: in float32, and the errors of `dtype` against it."""

    def __init__(self, source, tensors, dtype, device, sequences):
        self.exact = Reference(source, torch.float32, device)
        adapter_files.merge(self.exact.model, tensors, 2)
        self.has_experts = getattr(self.exact.model.config, "num_experts_per_tok", None) is not None
        with Reference(source, getattr(torch, dtype), device) as half:
            adapter_files.merge(half.model, tensors, 2)
            chosen = [half.experts(one) if self.has_experts else None for one in sequences]
            self.errors = self.errors_of([half.distribution(one) for one in sequences], sequences, chosen)

    def errors_of(self, got, sequences, experts):
        """A router near a tie may choose another expert in 16 bits, which no rounding of the logprobs explains. So
        float32 computes with the `experts` of the results that it is compared with."""
        exact = [self.exact.distribution(one, chosen) for one, chosen in zip(sequences, experts, strict=True)]
        return errors_of(got, exact)


def numerics(name, dtype="bfloat16"):
    def run(options):
        source, device = GOLDENS / name, torch_device(options)
        config = json.loads((source / "config.json").read_text())
        ids = list(range(config["vocab_size"]))
        sequences = prompts(7, (2, 7, 33, 200), config["vocab_size"])
        shapes, notes = adapter_files.linears(source), []
        with contextlib.ExitStack() as stack:
            place = stack.enter_context(room(options))
            merged, folders = {}, {}
            for seed, rank in enumerate((32, 8, 1)):
                tensors = adapter_files.adapter(shapes, rank, seed)
                folders[f"a{seed}"] = adapter_files.write(place / f"a{seed}", tensors, rank, 2 * rank)
                merged[f"a{seed}"] = Merged(source, tensors, dtype, device, sequences)
                stack.callback(merged[f"a{seed}"].exact.close)
            sparse = merged["a0"].has_experts
            for ranks in (1, 2):
                flags, env = device_flags(options, ranks)
                flags += ["--enable-return-routed-experts"] if sparse else []
                roots = ["--model-root", source, "--model-root", place]
                with Server(source, *flags, *FLAGS, *roots, "--dtype", dtype, env=env) as server:
                    routing = server.get("/capabilities")["model"]["routed_experts"] if sparse else None
                    plain, _ = score(server, sequences, None, ids)
                    for adapter, folder in folders.items():
                        load(server, adapter, folder)
                    alone, replies = {}, {}
                    for adapter in folders:
                        alone[adapter], replies[adapter] = score(
                            server, sequences, adapter, ids, return_routed_experts=sparse
                        )
                    mixed, _ = score(server, sequences * 4, [a for a in (None, *folders) for _ in sequences], ids)
                for adapter, reference in merged.items():
                    experts = (
                        read_all(replies[adapter], sequences, config, routing["sparse_layers"])
                        if sparse
                        else [None] * len(sequences)
                    )
                    ours = reference.errors_of(alone[adapter], sequences, experts)
                    notes.append(f"tp {ranks} {adapter} {ours[0]:.4f} / {ours[2]:.3f}")
                    for what, mine, other in zip(("mean", "median", "largest"), ours, reference.errors):
                        check(
                            mine <= allowed(ranks) * other,
                            f"tp {ranks}, {adapter}: {what} error {mine:.5f}, transformers in {dtype} with merged "
                            f"weights {other:.5f}",
                        )
                    apart = errors_of(alone[adapter], plain)[0]
                    check(apart > 5 * ours[0], f"{adapter} changes little: {apart:.4f} from the base")
                single = plain + [one for adapter in merged for one in alone[adapter]]
                for got, right in zip(mixed, single, strict=True):
                    check(bool((got - right).abs().max() < 0.05), "a mixed batch differs from the same requests alone")
        return f"mean / largest error {', '.join(notes)}; transformers in {dtype} {merged['a0'].errors[0]:.4f}"

    return run


for architecture in ("llama", "qwen2", "qwen3", "qwen3-moe", "olmo2"):
    test(f"adapters/numerics-{architecture}")(numerics(architecture))
for architecture in ("qwen3", "qwen3-moe"):
    test(f"fp16/adapters/{architecture}", gpu=True)(numerics(architecture, dtype="float16"))


@test("adapters/under-load")
def under_load(options):
    """Answers amid replacements are those of the version that they name; memory is flat over 300 loads."""
    source = GOLDENS / "qwen3"
    vocabulary = json.loads((source / "config.json").read_text())["vocab_size"]
    prompt = prompts(3, (40,), vocabulary)[0]
    shapes = adapter_files.linears(source)
    with room(options) as place:
        folders = [
            adapter_files.write(place / f"v{seed}", adapter_files.adapter(shapes, 16, seed, size=2), 16)
            for seed in range(3)
        ]
        flags, env = device_flags(options, 1)
        roots = ["--model-root", source, "--model-root", place]
        with Server(source, *flags, *FLAGS, *roots, env=env) as server:

            def answer():
                body = dict(
                    input_ids=prompt,
                    sampling_params=dict(max_new_tokens=24, temperature=0, ignore_eos=True),
                    lora_path="policy",
                )
                reply = server.post("/generate", body)
                return reply["meta_info"]["lora"]["version"], tuple(reply["output_ids"])

            def replace(variant):
                try:
                    server.post("/unload_lora_adapter", dict(lora_name="policy"))
                except Refused:
                    pass
                load(server, "policy", folders[variant])

            expected = []
            for variant in range(3):
                replace(variant)
                expected.append(answer()[1])
            check(len(set(expected)) == 3, "the variants answer alike")
            answers, done = [], False

            def client():
                while not done:
                    try:
                        answers.append(answer())
                    except Refused as error:
                        # Between unload and load the name is unknown.
                        check(error.status == 400, f"{error}")

            free = None
            with concurrent.futures.ThreadPoolExecutor(4) as pool:
                clients = [pool.submit(client) for _ in range(4)]
                for turn in range(300):
                    replace(turn % 3)
                    if turn == 20:
                        free = free_on_card() if options.device != "cpu" else 0
                done = True
                for one in clients:
                    one.result()
            # Versions count up from 1, and variants take turns.
            for version, ids in answers:
                check(ids == expected[(version - 1) % 3], f"version {version} answered as another one")
            lost = free - free_on_card() if options.device != "cpu" else 0
            check(lost < 8 << 20, f"{lost} bytes of the card are gone after 280 loads")
    return f"{len(answers)} answers amid 300 replacements"


@test("adapters/handles", gpu=True)
def handles(options):
    """Tensors on the card by CUDA handles give the same digest as the folder."""
    from multiprocessing.reduction import ForkingPickler

    import torch.multiprocessing  # noqa: F401 - it registers how tensors are pickled

    source = GOLDENS / "qwen3"
    shapes = adapter_files.linears(source)
    with room(options) as place:
        tensors = adapter_files.adapter(shapes, 8, 5)
        folder = adapter_files.write(place / "a", tensors, 8)
        flags, env = device_flags(options, 1)
        roots = ["--model-root", source, "--model-root", place]
        with Server(source, *flags, *FLAGS, *roots, env=env) as server:
            load(server, "disk", folder)
            on_card = {name: value.cuda().to(torch.bfloat16) for name, value in tensors.items()}
            for _ in range(3):
                buffer = io.BytesIO()
                ForkingPickler(buffer, 2).dump(list(on_card.items()))
                body = dict(
                    lora_name="card",
                    config_dict=adapter_files.config(8),
                    serialized_named_tensors=[base64.b64encode(buffer.getvalue()).decode()],
                )
                try:
                    server.post("/unload_lora_adapter", dict(lora_name="card"))
                except Refused:
                    pass
                server.post("/load_lora_adapter_from_tensors", body)
            held = {entry["name"]: entry["digest"] for entry in server.get("/adapters")["adapters"]}
            check(held["disk"] == held["card"], f"digests differ: {held}")
            # The same memory, kept open: its new values need no handles.
            name = dict(name="card", generation=1)
            buffer = io.BytesIO()
            ForkingPickler(buffer, 2).dump(list(on_card.items()))
            body.update(serialized_named_tensors=[base64.b64encode(buffer.getvalue()).decode()], upsert=True)
            server.post("/load_lora_adapter_from_tensors", dict(body, keep=name))
            del body["serialized_named_tensors"]
            for seed in (6, 7):
                other = adapter_files.adapter(shapes, 8, seed)
                for tensor, value in other.items():
                    on_card[tensor].copy_(value)
                torch.cuda.synchronize()
                server.post("/load_lora_adapter_from_tensors", dict(body, kept=name))
                load(server, "disk", adapter_files.write(place / f"a{seed}", other, 8))
                held = {entry["name"]: entry["digest"] for entry in server.get("/adapters")["adapters"]}
                check(held["disk"] == held["card"], f"kept, seed {seed}: digests differ: {held}")
            server.post("/release_kept_tensors", {})
    return "three loads by handles, three of kept memory"
