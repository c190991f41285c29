"""Calls of tools and structured output with the official openai client. Usage: openai_tools.py BASE_URL.

The model has random weights: only the grammars of the server make its replies valid.
"""

import json
import sys

import jsonschema
import openai

client = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0, timeout=100)
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Zürich"]}, "days": {"type": "integer", "minimum": 1, "maximum": 14}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
NOW = {"type": "object", "properties": {"utc": {"type": "boolean"}}, "required": ["utc"], "additionalProperties": False}
SCHEMAS = {"get_weather": WEATHER, "now": NOW}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()
]
NAMED = {"type": "function", "function": {"name": "now"}}
REQUEST = dict(
    model="any",
    messages=[{"role": "user", "content": "hi"}],
    max_tokens=400,
    temperature=1,
    # The end of reasoning is likely, and the model's end token ends no reasoning.
    logit_bias={"484": 4, "2": -100},
)


def check(calls, choice):
    assert calls, "a call is required"
    for call in calls:
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
        assert call.id and call.type == "function", call
    if choice == NAMED:
        assert [call.function.name for call in calls] == ["now"], calls


def plain(choice):
    for seed in range(5):
        reply = client.chat.completions.create(tools=TOOLS, tool_choice=choice, seed=seed, **REQUEST).choices[0]
        assert reply.finish_reason == ("stop" if choice == NAMED else "tool_calls"), reply
        assert reply.message.content == ""
        check(reply.message.tool_calls, choice)


def streamed(choice):
    for seed in range(3):
        with client.chat.completions.stream(tools=TOOLS, tool_choice=choice, seed=seed, **REQUEST) as stream:
            events = [event.type for event in stream]
            final = stream.get_final_completion().choices[0]
        assert "tool_calls.function.arguments.done" in events, set(events)
        check(final.message.tool_calls, choice)
        whole = client.chat.completions.create(tools=TOOLS, tool_choice=choice, seed=seed, **REQUEST).choices[0]
        both = ([call.function for call in message.tool_calls] for message in (final.message, whole.message))
        first, second = ([(function.name, function.arguments) for function in functions] for functions in both)
        assert first == second, (first, second)


def second_turn():
    """The message of a reply and its results go back as the client has them."""
    reply = client.chat.completions.create(tools=TOOLS, tool_choice="required", seed=1, **REQUEST).choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "12"} for call in reply.tool_calls]
    messages = [*REQUEST["messages"], reply, *results]
    again = client.chat.completions.create(tools=TOOLS, tool_choice=NAMED, seed=2, **{**REQUEST, "messages": messages})
    check(again.choices[0].message.tool_calls, NAMED)


def formats():
    format = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER}}
    extra = {"chat_template_kwargs": {"thinking": True}}
    reply = client.chat.completions.create(response_format=format, n=4, seed=3, extra_body=extra, **REQUEST)
    for choice in reply.choices:
        jsonschema.validate(json.loads(choice.message.content), WEATHER)
    assert any(choice.message.reasoning_content for choice in reply.choices)


for choice in ["required", NAMED]:
    plain(choice)
    streamed(choice)
second_turn()
formats()
print("ok", openai.__version__)
