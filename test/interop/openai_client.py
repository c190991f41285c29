"""Drives a server with the official openai client. Usage: openai_client.py BASE_URL; exits with 0 if all checks pass.

The server repeats the tokens of the prompt. Its template turns one message "hi" into "user:hi\\nassistant:".
"""

import asyncio
import sys

import openai

url = sys.argv[1]
client = openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0, timeout=50)
messages = [{"role": "user", "content": "hi"}]


def models():
    listed = client.models.list().data
    assert [model.id for model in listed] == ["fake"], listed
    assert client.models.retrieve("fake").id == "fake"
    try:
        client.models.retrieve("other")
        raise AssertionError("an unknown model was found")
    except openai.NotFoundError as error:
        assert error.code == "NOT_FOUND" and "other" in str(error), error


def completions():
    reply = client.completions.create(
        model="fake", prompt=["abc", "xyz"], max_tokens=3, n=2, logprobs=1, echo=True, seed=5
    )
    assert [choice.text for choice in reply.choices] == ["abcabc"] * 2 + ["xyzxyz"] * 2, reply
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage.prompt_tokens == 6 and reply.usage.completion_tokens == 12 and reply.usage.total_tokens == 18
    logprobs = reply.choices[0].logprobs
    assert logprobs.tokens == list("abcabc") and logprobs.token_logprobs[0] is None
    assert logprobs.text_offset == [0, 1, 2, 3, 4, 5]
    ids = client.completions.create(
        model="fake",
        prompt=[97, 98],
        max_tokens=2,
        extra_body={"return_token_ids": True, "top_k": 5, "ignore_eos": True},
    )
    assert ids.choices[0].token_ids == [97, 98] and ids.choices[0].prompt_token_ids == [97, 98], ids
    assert ids.metadata["weight_version"] == "default"


def completion_stream():
    chunks = list(
        client.completions.create(
            model="fake", prompt="abc", max_tokens=6, stop="bc", stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == "a", chunks
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason] == ["stop"]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 3


def chat():
    reply = client.chat.completions.create(
        model="fake", messages=messages, max_completion_tokens=4, n=2, logprobs=True, top_logprobs=2, temperature=0
    )
    assert [choice.message.content for choice in reply.choices] == ["user", "user"], reply
    assert reply.choices[0].message.role == "assistant"
    first = reply.choices[0].logprobs.content[0]
    assert first.token == "u" and first.bytes == [117] and len(first.top_logprobs) == 2
    assert abs(first.logprob + 1.17) < 1e-6


def chat_stream():
    stream = client.chat.completions.create(
        model="fake", messages=messages, max_tokens=4, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == "user"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == 4


def responses():
    asked = {"model": "fake", "input": "hi", "instructions": "be", "max_output_tokens": 9, "store": False}
    reply = client.responses.create(**asked)
    assert reply.output_text == "system:be", reply
    assert reply.status == "incomplete" and reply.incomplete_details.reason == "max_output_tokens", reply
    assert reply.usage.output_tokens == 9 and reply.usage.input_tokens == 28, reply.usage
    turns = [{"role": "user", "content": "hi"}, *reply.output, {"role": "user", "content": "on"}]
    assert client.responses.create(**{**asked, "input": turns}).output_text == "system:be"
    events = list(client.responses.create(**asked, stream=True))
    assert events[0].type == "response.created" and events[-1].type == "response.incomplete", events
    assert events[-1].response.output_text == "system:be", events[-1]
    with client.responses.stream(**asked, extra_body={"stop": "be"}) as events:
        seen = [event.type for event in events]
        assert events.get_final_response().output_text == "system:", events
    assert seen[-1] == "response.completed" and "response.output_text.delta" in seen, seen
    try:
        client.responses.create(**asked, previous_response_id="resp_1")
        raise AssertionError("a stored reply was accepted")
    except openai.BadRequestError as error:
        assert error.param == "previous_response_id", error


def early_close():
    stream = client.chat.completions.create(model="fake", messages=messages, max_tokens=400, stream=True)
    next(iter(stream))
    stream.close()


async def concurrent():
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0) as many:
        prompts = [chr(97 + i) * (i + 1) for i in range(20)]
        replies = await asyncio.gather(
            *(many.completions.create(model="fake", prompt=prompt, max_tokens=5) for prompt in prompts)
        )
        assert [reply.choices[0].text for reply in replies] == [prompt[0] * 5 for prompt in prompts]


def errors():
    for call, kind, code in [
        (
            lambda: client.completions.create(model="fake", prompt="a", temperature=-1),
            openai.BadRequestError,
            "INVALID_REQUEST",
        ),
        (
            lambda: client.completions.create(model="fake", prompt="a", max_tokens=100000),
            openai.BadRequestError,
            "PROMPT_TOO_LONG",
        ),
        (
            lambda: client.chat.completions.create(
                model="fake", messages=messages, extra_body={"lora_path": "adapter"}
            ),
            openai.BadRequestError,
            "UNSUPPORTED",
        ),
        (lambda: client.with_options(api_key="wrong").models.list(), openai.AuthenticationError, "UNAUTHORIZED"),
    ]:
        try:
            call()
            raise AssertionError(f"no {kind.__name__}")
        except kind as error:
            assert error.code == code, error


for step in [
    models,
    completions,
    completion_stream,
    chat,
    chat_stream,
    responses,
    early_close,
    lambda: asyncio.run(concurrent()),
    errors,
]:
    step()
print("ok", openai.__version__)
