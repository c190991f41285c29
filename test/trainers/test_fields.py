"""Every field of the released servers' requests is served, accepted or refused by name: none is ignored.

The schemas of openapi/openapi.json are the table; the fields are parsed from the sources of the releases, which are not
imported.
"""

import ast
import json
import pathlib

import pytest
import released

ROOT = pathlib.Path(__file__).resolve().parents[2]
API = json.loads((ROOT / "openapi/openapi.json").read_text())

# (package, file, class) -> (route, path of the object that holds the fields)
OWNERS = {
    ("vllm", "vllm/entrypoints/openai/completion/protocol.py", "CompletionRequest"): ("/v1/completions", ""),
    ("vllm", "vllm/entrypoints/openai/chat_completion/protocol.py", "ChatCompletionRequest"): (
        "/v1/chat/completions",
        "",
    ),
    ("vllm", "vllm/entrypoints/scale_out/token_in_token_out/protocol.py", "GenerateRequest"): (
        "/inference/v1/generate",
        "",
    ),
    ("vllm", "vllm/sampling_params.py", "SamplingParams"): ("/inference/v1/generate", "sampling_params"),
    ("sglang", "sglang/srt/entrypoints/openai/protocol.py", "CompletionRequest"): ("/v1/completions", ""),
    ("sglang", "sglang/srt/entrypoints/openai/protocol.py", "ChatCompletionRequest"): ("/v1/chat/completions", ""),
    ("vllm", "vllm/entrypoints/openai/responses/protocol.py", "ResponsesRequest"): ("/v1/responses", ""),
    ("sglang", "sglang/srt/entrypoints/openai/protocol.py", "ResponsesRequest"): ("/v1/responses", ""),
    ("vllm", "vllm/entrypoints/anthropic/protocol.py", "AnthropicMessagesRequest"): ("/v1/messages", ""),
    ("sglang", "sglang/srt/entrypoints/anthropic/protocol.py", "AnthropicMessagesRequest"): ("/v1/messages", ""),
    ("sglang", "sglang/srt/managers/io_struct.py", "GenerateReqInput"): ("/generate", ""),
    ("sglang", "sglang/srt/sampling/sampling_params.py", "SamplingParams"): ("/generate", "sampling_params"),
}


def resolve(schema):
    return API["components"]["schemas"][schema["$ref"].split("/")[-1]] if "$ref" in schema else schema


def objects_in(schema):
    """The objects in a schema that may be a union with lists of it and null."""
    schema = resolve(schema)
    inner = [found for branch in schema.get("anyOf", []) for found in objects_in(branch)]
    return [schema, *inner] if "properties" in schema else inner


def schema_of(route, path):
    schema = resolve(API["paths"][route]["post"]["requestBody"]["content"]["application/json"]["schema"])
    return objects_in(schema["properties"][path])[0] if path else schema


def fields_of(source, name):
    """The annotated fields of a class and of its bases in the file, private ones left out."""
    classes = {node.name: node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)}
    fields = []
    for base in classes[name].bases:
        if isinstance(base, ast.Name) and base.id in classes:
            fields += fields_of(source, base.id)
    for node in classes[name].body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            fields.append(node.target.id)
    return [field for field in fields if not field.startswith("_")]


@pytest.mark.parametrize("owner", OWNERS, ids=lambda owner: f"{owner[0]}-{owner[2]}")
def test_no_field_of_a_released_server_is_unknown(owner):
    package, file, name = owner
    schema = schema_of(*OWNERS[owner])
    fields = fields_of((released.folder_of(package) / file).read_text(), name)
    assert len(fields) > 5
    # A schema that forbids other fields refuses them by name.
    known = None if schema.get("additionalProperties") is False else set(schema["properties"])
    unknown = [] if known is None else [field for field in fields if field not in known]
    assert unknown == [], f"{package} has new fields: serve, accept or refuse them in src/http"
    marks = {field: schema["properties"].get(field, {}) for field in fields}
    both = [field for field, mark in marks.items() if "x-refit-refused" in mark and "x-refit-accepted" in mark]
    assert both == []


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_no_field_of_openai_s_client_is_unknown(route):
    from openai.types import chat, completion_create_params

    module = chat.completion_create_params if "chat" in route else completion_create_params
    fields = set(module.CompletionCreateParamsBase.__annotations__)
    assert {"model", "temperature"} <= fields
    assert fields - set(schema_of(route, "")["properties"]) == set()
