"""The experts of tokens, against transformers' routers on the same GPU: nearly as many choices agree with float32 as
for transformers in bfloat16. A record of other tokens, or of another layer, would agree with few. Prefills, decodes and
prefix-cache hits."""

import base64
import json

import torch

from harness import check, test
from machine import device_flags, torch_device
from reference import Reference, prompts
from server import ROOT, Server

GOLDENS = ROOT / "test/goldens"
GENERATED = 40


def agreement(got, expected):
    """For each layer, the fraction of tokens with the same experts."""
    return (got.sort(-1).values == expected.sort(-1).values).all(-1).float().mean(0)


def read_experts(reply, config, sparse, tokens):
    """The experts of tokens 0.. but the last, [tokens - 1, sparse layers, experts per token]. /generate sends all
    layers; layers without experts are zeros."""
    layers, k = config["num_hidden_layers"], config["num_experts_per_tok"]
    meta = reply["meta_info"]
    values = torch.frombuffer(bytearray(base64.b64decode(meta["routed_experts"])), dtype=torch.int32)
    check(
        values.numel() == (tokens - 1) * layers * k,
        f"{values.numel()} experts for {tokens} tokens of {layers} layers and {k} each",
    )
    rows = values.reshape(tokens - 1, layers, k).long()
    dense = [layer for layer in range(layers) if layer not in sparse]
    check(not rows[:, dense].any(), f"layers without experts {dense} have some")
    return rows[:, sparse]


def read_all(replies, sequences, config, sparse):
    return [
        read_experts(reply, config, sparse, len(tokens)) for reply, tokens in zip(replies, sequences, strict=True)
    ]


def against_transformers(name, ranks):
    def run(options):
        folder, device = GOLDENS / name, torch_device(options)
        config = json.loads((folder / "config.json").read_text())
        given = prompts(3, (2, 33, 150), config["vocab_size"])
        flags, env = device_flags(options, ranks)
        with Server(
            folder, *flags, "--dtype", "bfloat16", "--max-total-tokens", 2048, "--enable-return-routed-experts", env=env
        ) as server:
            known = server.get("/capabilities")["model"]["routed_experts"]
            sparse = known["sparse_layers"]

            def ask(sequences, count):
                params = dict(max_new_tokens=count, temperature=0, ignore_eos=True)
                return server.post(
                    "/generate", dict(input_ids=sequences, sampling_params=params, return_routed_experts=True)
                )

            made = ask(given, GENERATED)
            whole = [prompt + reply["output_ids"] for prompt, reply in zip(given, made, strict=True)]
            decoded = read_all(made, whole, config, sparse)
            hits = ask(whole, 0)
            check(
                hits[-1]["meta_info"]["cached_tokens"] >= 128,
                f"{hits[-1]['meta_info']['cached_tokens']} tokens came from the prefix cache",
            )
            for tokens, reply, rows in zip(whole, hits, decoded, strict=True):
                cached, again = reply["meta_info"]["cached_tokens"], read_experts(reply, config, sparse, len(tokens))
                wrong = (again[:cached] != rows[:cached]).any(-1).nonzero()
                check(
                    len(wrong) == 0,
                    f"of {cached} cached tokens after a prompt of {len(tokens)}, {len(wrong)} have other experts than "
                    f"when they were computed, first (token, layer) {wrong[:1].tolist()}",
                )
            server.post("/flush_cache")
            fresh = read_all(ask(whole, 0), whole, config, sparse)
        with Reference(folder, torch.bfloat16, device) as rounded, Reference(folder, torch.float32, device) as exact:
            right = [exact.experts(tokens) for tokens in whole]
            half = torch.cat([rounded.experts(tokens) for tokens in whole])
        expected = torch.cat(right)
        theirs = agreement(half, expected)
        notes = []
        for what, got in (("decoded", decoded), ("one prefill", fresh)):
            rows = torch.cat(got)
            check(
                int(rows.max()) < known["experts"] and (rows.sort(-1).values.diff(dim=-1) > 0).all(),
                f"{what}: an expert that does not exist, or twice for one token",
            )
            ours = agreement(rows, expected)
            notes.append(f"{what} {[round(float(share), 3) for share in ours]}")
            first = [int((one != other).any(-1).any(-1).float().argmax()) for one, other in zip(got, right)]
            check(
                bool((ours >= theirs - 0.05).all()),
                f"tp {ranks}, {what}: of each layer's choices {ours.tolist()} are float32's, of transformers in "
                f"bfloat16 {theirs.tolist()}; first token that differs, of each sequence: {first}",
            )
        return (
            f"choices as in float32, by layer: {', '.join(notes)}; transformers in bfloat16 "
            f"{[round(float(share), 3) for share in theirs]}"
        )

    return run


for model in ("qwen3-moe", "qwen3-moe-step2"):
    for count in (1, 2):
        test(f"experts/{model}/tp{count}")(against_transformers(model, count))
