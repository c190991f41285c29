"""Replies of models, parsed by refit and by the released SGLang's own parsers."""

import json
import re

import pytest

import sglang_parsers

TOOLS = [
    dict(
        type="function",
        function=dict(
            name="get_weather",
            parameters=dict(
                type="object",
                properties=dict(city=dict(type="string"), days=dict(type="integer"), exact=dict(type="boolean")),
            ),
        ),
    ),
    dict(type="function", function=dict(name="now", parameters=dict(type="object", properties={}))),
]
ARGUMENTS = '{"city": "Zürich \\"x\\"", "days": 3}'
CALLS = [("get_weather", json.loads(ARGUMENTS)), ("now", {})]


def blocks(*calls):
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


def json_call(name, arguments, key="arguments"):
    return f'{{"name": "{name}", "{key}": {arguments}}}'


def coder(name, *parameters):
    values = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in parameters)
    return f"<function={name}>\n{values}</function>"


def glm(name, gap, *parameters):
    pairs = (f"<arg_key>{k}</arg_key>{gap}<arg_value>{v}</arg_value>{gap}" for k, v in parameters)
    return f"<tool_call>{name}{gap}{''.join(pairs)}</tool_call>"


def deepseek(*calls):
    made = "\n".join(f"<｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜>" for call in calls)
    return f"<｜tool▁calls▁begin｜>{made}<｜tool▁calls▁end｜>"


def v3(name, arguments):
    return f"function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```"


def dsml(section):
    parameters = (
        '<｜DSML｜parameter name="city" string="true">Zürich "x"</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
    )
    calls = f'<｜DSML｜invoke name="get_weather">\n{parameters}</｜DSML｜invoke>\n'
    calls += '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>'
    return f"\n<｜DSML｜{section}>\n{calls}\n</｜DSML｜{section}>"


def kimi(*calls):
    made = (f"<|tool_call_begin|>{name}<|tool_call_argument_begin|>{args}<|tool_call_end|>" for name, args in calls)
    return f"<|tool_calls_section_begin|>{''.join(made)}<|tool_calls_section_end|>"


def harmony(name, arguments):
    head = f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json"
    return f"{head}<|message|>{arguments}<|call|>"


VALUES = [("city", 'Zürich "x"'), ("days", "3")]
HERMES = blocks(json_call("get_weather", ARGUMENTS), json_call("now", "{}"))
TEXTS = {
    "qwen25": HERMES,
    "hermes": HERMES,
    "qwen3_coder": blocks(coder("get_weather", *VALUES), coder("now")),
    "glm45": glm("get_weather", "\n", *VALUES) + "\n" + glm("now", "\n"),
    "glm47": glm("get_weather", "", *VALUES) + glm("now", ""),
    "deepseekv3": deepseek(v3("get_weather", ARGUMENTS), v3("now", "{}")),
    "deepseekv31": deepseek(f"get_weather<｜tool▁sep｜>{ARGUMENTS}", "now<｜tool▁sep｜>{}"),
    "deepseekv32": dsml("function_calls"),
    "deepseekv4": dsml("tool_calls"),
    "kimi_k2": kimi(("functions.get_weather:0", ARGUMENTS), ("functions.now:1", "{}")),
    "gpt-oss": harmony("get_weather", ARGUMENTS) + harmony("now", "{}"),
    "llama3": "<|python_tag|>"
    + "; ".join([json_call("get_weather", ARGUMENTS, "parameters"), json_call("now", "{}", "parameters")]),
    "mistral": f"[TOOL_CALLS] [{json_call('get_weather', ARGUMENTS)}, {json_call('now', '{}')}]",
}
# SGLang's parser of a stream needs each marker in one piece, as the token that it is in the model's vocabulary.
MARKER = r"<[^<>\s]*>|\[TOOL_CALLS\]|(?s:.)"


def parsed(calls):
    return [(name, json.loads(arguments)) for name, arguments in calls]


def refit(engine, name, text):
    reply = engine.post("/parse_function_call", dict(text=text, tools=TOOLS, tool_call_parser=name))
    return reply["normal_text"], [(call["name"], call["parameters"]) for call in reply["calls"]]


@pytest.mark.parametrize("name", TEXTS)
def test_calls_are_those_that_sglang_reads(engines, name):
    text = "Look:\n" + TEXTS[name]
    ours, theirs = refit(engines("qwen3"), name, text), sglang_parsers.whole(name, TOOLS, text)
    assert parsed(ours[1]) == parsed(theirs[1]) == CALLS
    # refit leaves out the white space next to calls in every format.
    assert ours[0] == theirs[0].strip() == "Look:"
    assert ours[1] == theirs[1], "the same JSON text"


# In SGLang's stream a list of several calls, as Mistral's, loses all but the first, and gpt-oss's text comes twice.
@pytest.mark.parametrize("name", sorted(TEXTS.keys() - {"mistral", "gpt-oss"}))
def test_a_stream_of_sglang_has_the_calls_of_refit(engines, name):
    text = "Look:\n" + TEXTS[name]
    content, calls = sglang_parsers.streamed(name, TOOLS, re.findall(MARKER, text))
    ours = refit(engines("qwen3"), name, text)
    assert parsed(calls) == parsed(ours[1])
    assert content.strip() == ours[0]


def test_refit_keeps_what_sglang_loses(engines):
    """The deliberate differences, as docs/tools.md has them."""
    engine = engines("qwen3")
    broken = blocks('{"name": "now", }', json_call("now", "{}"))
    assert sglang_parsers.whole("qwen25", TOOLS, broken) == ("", [("now", "{}")]), "the malformed call is lost"
    assert refit(engine, "qwen25", broken) == (blocks('{"name": "now", }'), [("now", "{}")])
    unknown = blocks(json_call("other", "{}"))
    assert sglang_parsers.whole("qwen25", TOOLS, unknown)[1] == []
    assert refit(engine, "qwen25", unknown) == ("", [("other", "{}")])


@pytest.mark.parametrize(
    ["name", "text"],
    [
        ("qwen3", "<think>a b</think>yes"),
        ("qwen3", "yes"),
        ("qwen3", "<think>cut"),
        ("qwen3-thinking", "a b</think>yes"),
        ("deepseek-r1", "a b</think>yes"),
        ("deepseek-r1", "<think>a b</think>yes"),
        ("glm45", "<think>a b</think>yes"),
        ("kimi", "◁think▷a b◁/think▷yes"),
        ("kimi_k2", "<think>a b</think>yes"),
        ("mistral", "[THINK]a b[/THINK]yes"),
        (
            "gpt-oss",
            "<|channel|>analysis<|message|>a b<|end|><|start|>assistant<|channel|>final<|message|>yes<|return|>",
        ),
    ],
)
def test_reasoning_is_what_sglang_reads(engines, name, text):
    reply = engines("qwen3").post("/separate_reasoning", dict(text=text, reasoning_parser=name))
    assert (reply["reasoning_text"], reply["text"]) == sglang_parsers.reasoning(name, text)
