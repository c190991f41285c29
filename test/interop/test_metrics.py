"""/metrics, read with Prometheus's own Python parser, as prime-rl and miles read it."""

import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from conftest import Server
from tensors import ROOT


@pytest.fixture(scope="module")
def adder():
    server = Server(ROOT / "models/adder-base", "--model-root", ROOT / "models", "--max-total-tokens", 4096)
    yield server
    server.stop()


def scrape(url):
    with urllib.request.urlopen(f"{url}/metrics") as reply:
        families = list(text_string_to_metric_families(reply.read().decode()))
    names = [family.name for family in families]
    assert len(set(names)) == len(names)
    return families


def values(families, name, **labels):
    found = [
        sample.value
        for family in families
        for sample in family.samples
        if sample.name == name and all(sample.labels.get(key) == value for key, value in labels.items())
    ]
    assert found, name
    return sum(found)


def test_what_prime_rl_decides_by(adder):
    """Its concurrency stays at one episode if no family begins with vllm:."""
    families = scrape(adder.url)
    for name in [
        "kv_cache_usage_perc",
        "num_requests_running",
        "num_requests_waiting",
        "num_preemptions_total",
        "prefix_cache_hits_total",
    ]:
        assert values(families, f"vllm:{name}", engine="0") == 0
    assert values(families, "vllm:num_requests_waiting_by_reason", reason="capacity") == 0
    [info] = [sample for family in families for sample in family.samples if sample.name == "vllm:cache_config_info"]
    assert info.value == 1
    size = int(info.labels["kv_cache_size_tokens"])
    assert size == 4096
    assert size == int(info.labels["num_gpu_blocks"]) * int(info.labels["block_size"])
    assert adder.get("/v1/models")["data"][0]["max_model_len"] > 0


def test_counters_grow_with_every_request(adder):
    before = scrape(adder.url)
    prompt = "123456789+1="
    for _ in range(2):
        reply = adder.post("/generate", dict(text=prompt, sampling_params=dict(max_new_tokens=4, ignore_eos=True)))
        assert reply["meta_info"]["completion_tokens"] == 4
        after = scrape(adder.url)
        for prefix in "refit", "vllm", "sglang":
            grew = lambda name: values(after, f"{prefix}:{name}") - values(before, f"{prefix}:{name}")  # noqa: E731
            assert grew("generation_tokens_total") == 4
            assert grew("prompt_tokens_total") == reply["meta_info"]["prompt_tokens"]
            for histogram, count in dict(
                time_to_first_token_seconds=1,
                inter_token_latency_seconds=3,
                request_time_per_output_token_seconds=1,
                e2e_request_latency_seconds=1,
            ).items():
                assert grew(f"{histogram}_count") == count
                assert grew(f"{histogram}_sum") >= 0
        assert values(after, "sglang:num_requests_total") - values(before, "sglang:num_requests_total") == 1
        before = after
