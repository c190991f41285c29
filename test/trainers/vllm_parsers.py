"""vLLM's parsers of tool calls, from its released wheel. Its server and its platform have stand-ins, its parsers have
none."""

import logging
import re
import sys
import uuid
from typing import Any

from pydantic import BaseModel, Field

import released
from sglang_parsers import Unused


class FunctionDefinition(BaseModel):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    type: str = "function"
    function: FunctionDefinition


class FunctionCall(BaseModel):
    id: str | None = None
    name: str
    arguments: str


class ToolCall(BaseModel):
    id: str = Field(default_factory=lambda: str(uuid.uuid4()))
    type: str = "function"
    function: FunctionCall


class DeltaFunctionCall(BaseModel):
    name: str | None = None
    arguments: str | None = None


class DeltaToolCall(BaseModel):
    id: str | None = None
    type: str | None = None
    index: int
    function: DeltaFunctionCall | None = None


class ExtractedToolCallInformation(BaseModel):
    tools_called: bool
    tool_calls: list[ToolCall]
    content: str | None = None


class DeltaMessage(BaseModel):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[DeltaToolCall] = Field(default_factory=list)


class Request:
    """A chat request, as far as the parsers read it."""

    def __init__(self, tools):
        self.tools, self.tool_choice, self.messages = tools, "auto", []
        self.skip_special_tokens, self.chat_template_kwargs, self.include_reasoning = True, None, True
        self.parallel_tool_calls = True


class Markers:
    """A tokenizer in which each marker of a format is one token, and any other character too."""

    MARKER = re.compile(r"</?(?:tool_call|arg_key|arg_value)>|<｜[^｜<>]*｜>|<\|[a-z_]*\|>|</?｜DSML｜[a-z_]*|.", re.S)
    FIRST = 1000
    # Parsers require the markers of their format in a vocabulary.
    ALWAYS = "<tool_call></tool_call><|python_tag|><｜tool▁calls▁begin｜><｜tool▁calls▁end｜>"
    ALWAYS += "<｜tool▁call▁begin｜><｜tool▁call▁end｜><｜tool▁sep｜>"

    def __init__(self, text):
        self.pieces = list(dict.fromkeys(self.MARKER.findall(self.ALWAYS + text)))
        self.ids = {piece: self.FIRST + i for i, piece in enumerate(self.pieces)}
        self.all_special_tokens, self.all_special_ids, self.eos_token_id = [], [], 0

    def get_vocab(self):
        return dict(self.ids)

    def encode(self, text, add_special_tokens=False, **_):
        return [self.ids[piece] for piece in self.MARKER.findall(text) if piece in self.ids]

    def decode(self, ids, **_):
        return "".join(self.pieces[id - self.FIRST] for id in ([ids] if isinstance(ids, int) else ids))

    def convert_tokens_to_ids(self, token):
        return self.ids.get(token)


NAMES = dict(
    qwen25="hermes",
    hermes="hermes",
    qwen3_coder="qwen3_coder",
    glm45="glm45",
    glm47="glm47",
    deepseekv3="deepseek_v3",
    deepseekv31="deepseek_v31",
    deepseekv32="deepseek_v32",
    deepseekv4="deepseek_v4",
    kimi_k2="kimi_k2",
    llama3="llama3_json",
)


def load():
    released.bare("vllm", "vllm", "vllm.entrypoints", "vllm.entrypoints.generate", "vllm.entrypoints.generate.base")
    openai = "vllm.entrypoints.openai"
    released.bare("vllm", openai, f"{openai}.chat_completion", f"{openai}.responses", "vllm.parser")
    released.bare("vllm", "vllm.parser.engine", "vllm.reasoning", "vllm.renderers", "vllm.utils", "vllm.v1")
    calls = dict(
        FunctionCall=FunctionCall,
        ToolCall=ToolCall,
        DeltaFunctionCall=DeltaFunctionCall,
        DeltaToolCall=DeltaToolCall,
        DeltaMessage=DeltaMessage,
        ExtractedToolCallInformation=ExtractedToolCallInformation,
        FunctionDefinition=FunctionDefinition,
    )
    chat = dict(ChatCompletionToolsParam=Tool, ChatCompletionRequest=Request)
    protocols = {"generate.base": calls, "openai.chat_completion": chat, "openai.responses": {}}
    stands = {f"vllm.entrypoints.{where}.protocol": members for where, members in protocols.items()}
    environment = dict(VLLM_ENFORCE_STRICT_TOOL_CALLING=False, VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS=10)
    stands |= {
        "vllm.envs": environment,
        "vllm.renderers.chat_utils": dict(make_tool_call_id=lambda *_, **__: "id"),
        "vllm.sampling_params": {},
        "vllm.tokenizers": {},
        "vllm.utils.collection_utils": {},
        "vllm.utils.import_utils": {},
        "vllm.utils.mistral": dict(is_mistral_tokenizer=lambda _: False),
        "vllm.tool_parsers.structural_tag_registry": {},
        "vllm.reasoning.abs_reasoning_parsers": {},
        "vllm.v1.structured_output.backend_xgrammar": {},
        "vllm.parser.metrics": {},
        # It needs mistral_common and ijson, so it is not compared.
        "vllm.parser.mistral": {},
        "vllm.logger": dict(init_logger=logging.getLogger),
    }
    for name, members in stands.items():
        sys.modules[name] = Unused(name)
        sys.modules[name].__dict__.update(members)
    for name in ["xgrammar", "msgspec"]:
        sys.modules.setdefault(name, Unused(name))
    from vllm.tool_parsers import ToolParserManager

    return ToolParserManager


MANAGER = load()


def parser(name, tools, text):
    return MANAGER.get_tool_parser(NAMES[name])(Markers(text), [Tool(**tool) for tool in tools])


def whole(name, tools, text):
    found = parser(name, tools, text).extract_tool_calls(text, Request([Tool(**tool) for tool in tools]))
    return found.content or "", [(call.function.name, call.function.arguments) for call in found.tool_calls]


def streamed(name, tools, text):
    """The joined deltas, one token at a time."""
    of, request = parser(name, tools, text), Request([Tool(**tool) for tool in tools])
    pieces, content, calls = Markers.MARKER.findall(text), "", {}
    before, ids = "", []
    for piece in pieces:
        new = of.model_tokenizer.encode(piece)
        delta = of.extract_tool_calls_streaming(before, before + piece, piece, ids, ids + new, new, request)
        before, ids = before + piece, ids + new
        if delta is None:
            continue
        content += delta.content or ""
        for call in delta.tool_calls:
            made = calls.setdefault(call.index, ["", ""])
            made[0] += (call.function and call.function.name) or ""
            made[1] += (call.function and call.function.arguments) or ""
    return content, [tuple(call) for _, call in sorted(calls.items())]

