"""Drives a server with the official anthropic client. Usage: anthropic_client.py BASE_URL; exits with 0 if all checks
pass.

The model of the server replies with reasoning, text and a call of the tool `add`.
"""

import asyncio
import sys

import anthropic

url = sys.argv[1]
client = anthropic.Anthropic(base_url=url, api_key="secret", max_retries=0, timeout=50)
messages = [{"role": "user", "content": "hi"}]
tools = [{"name": "add", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}]
asked = {"model": "fake", "max_tokens": 300, "messages": messages, "tools": tools}


def check(message):
    thinking, text, use = message.content
    assert (thinking.type, thinking.thinking) == ("thinking", "hm"), thinking
    assert (text.type, text.text.strip()) == ("text", "See."), text
    assert (use.type, use.name, use.input) == ("tool_use", "add", {"a": 1}), use
    assert message.stop_reason == "tool_use" and message.role == "assistant", message
    assert message.usage.output_tokens > 20, message.usage


def create():
    message = client.messages.create(**asked)
    check(message)
    result = {"type": "tool_result", "tool_use_id": message.content[2].id, "content": "2"}
    turns = [*messages, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    check(client.messages.create(**{**asked, "messages": turns}))


def stream():
    seen = []
    with client.messages.stream(**asked) as events:
        for event in events:
            seen.append(event.type)
        check(events.get_final_message())
    assert seen[0] == "message_start" and seen[-1] == "message_stop", seen
    assert seen.count("content_block_start") == seen.count("content_block_stop") == 3, seen
    raw = [event.type for event in client.messages.create(**asked, stream=True)]
    assert raw[-2:] == ["message_delta", "message_stop"], raw


def count():
    count = client.messages.count_tokens(model="fake", messages=messages, tools=tools).input_tokens
    usage = client.messages.create(**asked).usage
    assert count == usage.input_tokens + usage.cache_read_input_tokens, (count, usage)


def refusals():
    picture = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
    try:
        client.messages.create(**{**asked, "messages": [{"role": "user", "content": [picture]}]})
        raise AssertionError("an image was accepted")
    except anthropic.BadRequestError as error:
        assert error.body["error"]["type"] == "invalid_request_error" and "image" in str(error), error
    try:
        anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0).messages.create(**asked)
        raise AssertionError("a wrong key was accepted")
    except (anthropic.AuthenticationError, anthropic.PermissionDeniedError) as error:
        assert error.body["error"]["type"] in ("authentication_error", "permission_error"), error


async def together():
    many = anthropic.AsyncAnthropic(base_url=url, api_key="secret", max_retries=0)
    for message in await asyncio.gather(*[many.messages.create(**asked) for _ in range(4)]):
        check(message)


create()
stream()
count()
refusals()
asyncio.run(together())
print("ok", anthropic.__version__)
