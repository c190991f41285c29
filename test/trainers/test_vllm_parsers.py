"""Replies of models, parsed by refit and by the released vLLM's own parsers (all but Mistral's, which needs more
packages)."""

import pytest

import vllm_parsers
from test_parsers import CALLS, TEXTS, TOOLS, blocks, json_call, parsed, refit


@pytest.mark.parametrize("name", vllm_parsers.NAMES)
def test_calls_are_those_that_vllm_reads(engines, name):
    text = "Look:\n" + TEXTS[name]
    ours, theirs = refit(engines("qwen3"), name, text), vllm_parsers.whole(name, TOOLS, text)
    assert parsed(ours[1]) == parsed(theirs[1]) == CALLS
    assert ours[1] == theirs[1], "the same JSON text"
    # vLLM drops what stands before Llama's calls.
    assert ours[0] == "Look:" and theirs[0].strip() == ("" if name == "llama3" else "Look:")
    vllm_name = vllm_parsers.NAMES[name]
    if vllm_name not in ("hermes", "glm45", "glm47"):
        assert refit(engines("qwen3"), vllm_name, text) == ours, "the same format under vLLM's name"


# vLLM's stream of Llama's calls begins with the first character or not at all, and lacks arguments that are {}.
@pytest.mark.parametrize("name", sorted(vllm_parsers.NAMES.keys() - {"llama3"}))
def test_a_stream_of_vllm_has_the_calls_of_refit(engines, name):
    text = "Look:\n" + TEXTS[name]
    content, calls = vllm_parsers.streamed(name, TOOLS, text)
    ours = refit(engines("qwen3"), name, text)
    assert parsed(calls) == parsed(ours[1]) == CALLS
    assert content.strip() == ours[0] == "Look:"


def test_refit_keeps_the_calls_around_a_malformed_one(engines):
    """vLLM returns the whole text as content, as docs/tools.md says."""
    broken = blocks('{"name": "now", }', json_call("now", "{}"))
    assert vllm_parsers.whole("hermes", TOOLS, broken) == (broken, [])
    assert refit(engines("qwen3"), "hermes", broken) == (blocks('{"name": "now", }'), [("now", "{}")])


def test_a_function_that_tools_do_not_have_is_returned_by_both(engines):
    unknown = blocks(json_call("other", "{}"))
    assert vllm_parsers.whole("hermes", TOOLS, unknown)[1] == [("other", "{}")]
    assert refit(engines("qwen3"), "hermes", unknown) == ("", [("other", "{}")])


@pytest.mark.parametrize("text", ["no call at all", "<tool_call> is a marker", "a < b and {x}"])
@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "kimi_k2", "deepseekv31", "llama3"])
def test_text_without_calls_stays_text(engines, name, text):
    assert refit(engines("qwen3"), name, text) == (text, [])
    # vLLM's engine for qwen3_coder takes an open marker for a call that was cut off.
    if not (name == "qwen3_coder" and "<tool_call>" in text):
        assert vllm_parsers.whole(name, TOOLS, text) == (text, [])
