"""The names, types and labels of /metrics against the sources of the released vLLM and SGLang."""

import re
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from released import folder_of

SOURCES = dict(vllm=["vllm/v1/metrics/loggers.py"], sglang=["sglang/srt/observability/metrics_collector.py"])
# Names of older releases, which trainers still read.
OLD = {"vllm:gpu_cache_usage_perc", "sglang:time_per_output_token_seconds"}


def declared(server):
    """Types by name, as prometheus_client writes them: a counter's name loses its _total."""
    made = r"(gauge|counter|histogram)(?:_cls)?\(\s*(?:#[^\n]*\s*)*name=\"(%s:\w+)\"" % server
    found = {}
    for source in SOURCES[server]:
        text = (folder_of(server) / source).read_text()
        for kind, name in re.findall(made, text, re.IGNORECASE):
            found[name.removesuffix("_total") if kind.lower() == "counter" else name] = kind.lower()
        # Gauges whose name is chosen apart from the call.
        found |= dict.fromkeys(re.findall(r"^ +name = \"(%s:\w+)\"$" % server, text, re.MULTILINE), "gauge")
    return found


def families_of(server):
    with urllib.request.urlopen(f"{server.url}/metrics") as reply:
        return {family.name: family for family in text_string_to_metric_families(reply.read().decode())}


@pytest.mark.parametrize("server", SOURCES)
def test_names_and_types_are_the_servers_own(engines, server):
    families = families_of(engines("qwen3", 1))
    ours = {name: one.type for name, one in families.items() if name.startswith(f"{server}:") and name not in OLD}
    theirs = declared(server)
    assert len(ours) > 15
    assert ours == {name: theirs.get(name) for name in ours}


def test_a_label_that_sglang_declares_for_one_family_is_there(engines):
    """Such as is_streaming; the labels that all families of a collector have come from elsewhere."""
    declared = {}
    made = r"name=\"(sglang:\w+)\",(?:(?!name=).)*?labelnames=([^\n]*)"
    for source in SOURCES["sglang"]:
        for name, labels in re.findall(made, (folder_of("sglang") / source).read_text(), re.DOTALL):
            # The parser drops _total from the name of a counter, and keeps it in that of a gauge.
            declared[name] = declared[name.removesuffix("_total")] = set(re.findall(r"\"(\w+)\"", labels))
    assert declared["sglang:num_requests"] == {"is_streaming"}
    common = {"model_name", "engine_type", "tp_rank", "pp_rank", "moe_ep_rank", "le"}
    ours = {
        name: set().union(*(sample.labels for sample in family.samples)) - common
        for name, family in families_of(engines("qwen3", 1)).items()
        if name.startswith("sglang:") and name not in OLD
    }
    assert len(ours) > 15
    assert ours == {name: declared.get(name) for name in ours}
