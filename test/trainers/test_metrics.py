"""The names and types of /metrics against the sources of the released vLLM and SGLang."""

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


@pytest.mark.parametrize("server", SOURCES)
def test_names_and_types_are_the_servers_own(engines, server):
    with urllib.request.urlopen(f"{engines('qwen3', 1).url}/metrics") as reply:
        families = {family.name: family.type for family in text_string_to_metric_families(reply.read().decode())}
    ours = {name: kind for name, kind in families.items() if name.startswith(f"{server}:") and name not in OLD}
    theirs = declared(server)
    assert len(ours) > 15
    assert ours == {name: theirs.get(name) for name in ours}
