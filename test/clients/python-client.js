// Generates a Python client from an OpenAPI document: a TypedDict for each schema, and a method for each operation and
// kind of body that returns Ok(data) or Failed(error) with the document's types. Standard library only, Python 3.11 or
// newer. No npm package generates Python clients; this one proves that the document is sufficient. Unions stay unions,
// so a type checker separates their cases.

const RUNTIME = `"""Written from openapi/openapi.json by test/clients/python-client.js."""
import http.client
import json
import urllib.parse
import uuid
from dataclasses import dataclass
from typing import Any, Generic, Literal, NotRequired, TypedDict, TypeVar, Union, cast

T = TypeVar("T")


@dataclass
class Ok(Generic[T]):
    data: T
    status: int


@dataclass
class Failed(Generic[T]):
    error: T
    status: int


def form(fields: Any) -> tuple[bytes, str]:
    """Bytes become files, lists of bytes several of a name; all else fields, which stand before the files."""
    boundary, parts, files = uuid.uuid4().hex, b"", b""
    for name, value in fields.items():
        for index, one in enumerate(value if isinstance(value, list) else [value]):
            about = ""
            if isinstance(one, bytes):
                about = f'; filename="{index}.safetensors"\\r\\ncontent-type: application/octet-stream'
            content = one if isinstance(one, bytes) else str(one).encode()
            head = f'--{boundary}\\r\\ncontent-disposition: form-data; name="{name}"{about}\\r\\n\\r\\n'
            part = head.encode() + content + b"\\r\\n"
            if isinstance(one, bytes):
                files += part
            else:
                parts += part
    return parts + files + f"--{boundary}--\\r\\n".encode(), f"multipart/form-data; boundary={boundary}"


class Api:
    def __init__(self, url: str, key: str | None = None) -> None:
        self.url, self.key = urllib.parse.urlsplit(url), key

    def request(
        self, method: str, path: str, query: Any = None, body: bytes | None = None, kind: str = "application/json"
    ) -> Any:
        connection = http.client.HTTPConnection(cast(str, self.url.hostname), self.url.port)
        headers = {} if body is None else {"content-type": kind}
        if self.key is not None:
            headers["authorization"] = f"Bearer {self.key}"
        if query:
            path += "?" + urllib.parse.urlencode(query)
        connection.request(method, path, body, headers)
        reply = connection.getresponse()
        data: Any = reply.read().decode()
        connection.close()
        if "json" in (reply.headers["content-type"] or ""):
            data = json.loads(data)
        return Ok(data, reply.status) if reply.status < 400 else Failed(data, reply.status)
`

const KINDS = { 'application/json': '', 'multipart/form-data': '_form', 'application/octet-stream': '_bytes' }

export function pythonClient (document) {
  const classes = new Map()
  for (const [name, schema] of Object.entries(document.components.schemas)) named(name, schema, classes)
  const methods = []
  for (const [path, operations] of Object.entries(document.paths)) {
    for (const [method, operation] of Object.entries(operations)) {
      methods.push(...methodsOf(path, method, operation, classes))
    }
  }
  return `${RUNTIME}\n${methods.join('\n')}\n\n${[...classes.values()].join('\n')}\n`
}

/** Declares a schema under a name, and returns the reference to it. */
function named (name, schema, classes) {
  if (schema.type === 'object' && schema.properties !== undefined) {
    const required = new Set(schema.required)
    const fields = Object.entries(schema.properties).map(([key, value]) => {
      const type = typeOf(value, `${name}${pascal(key)}`, classes)
      return `    ${JSON.stringify(key)}: ${required.has(key) ? type : `NotRequired[${type}]`},`
    })
    classes.set(name, `${name} = TypedDict("${name}", {\n${fields.join('\n')}\n})`)
  } else {
    // The cases of a union need names other than its own.
    classes.set(name, `${name} = ${typeOf(schema, `${name}Case`, classes)}`)
  }
  return `"${name}"`
}

/** The Python type of a schema; `name`: for a declaration that it needs. */
function typeOf (schema, name, classes) {
  if (schema === undefined || schema === true) return 'Any'
  if (schema.$ref !== undefined) return `"${schema.$ref.split('/').at(-1)}"`
  const cases = schema.anyOf ?? schema.oneOf
  if (cases !== undefined) return union(cases.map((one, index) => typeOf(one, `${name}${index || ''}`, classes)))
  if (schema.const !== undefined) return `Literal[${literal(schema.const)}]`
  if (schema.enum !== undefined) return `Literal[${schema.enum.map(literal).join(', ')}]`
  if (Array.isArray(schema.type)) return union(schema.type.map(type => typeOf({ ...schema, type }, name, classes)))
  switch (schema.type) {
    case 'string':
      return schema.format === 'binary' ? 'bytes' : 'str'
    case 'integer':
      return 'int'
    case 'number':
      return 'float'
    case 'boolean':
      return 'bool'
    case 'null':
      return 'None'
    case 'array':
      return `list[${typeOf(schema.items, `${name}Item`, classes)}]`
    case 'object':
      if (schema.properties !== undefined) return named(name, schema, classes)
      return `dict[str, ${
        typeof schema.additionalProperties === 'object'
          ? typeOf(schema.additionalProperties, `${name}Value`, classes)
          : 'Any'
      }]`
    default:
      return 'Any'
  }
}

function methodsOf (path, method, operation, classes) {
  const base = pascal(operation.operationId)
  const name = operation.operationId.replace(/[A-Z]/g, letter => `_${letter.toLowerCase()}`)
  const ok = contentType(operation.responses, status => status.startsWith('2'), `${base}Reply`, classes)
  const failed = contentType(operation.responses, status => !status.startsWith('2'), `${base}Error`, classes)
  const result = `Ok[${ok}] | Failed[${failed}]`
  const parameters = operation.parameters ?? []
  const inPath = parameters.filter(one => one.in === 'path').map(one => one.name)
  const inQuery = parameters.filter(one => one.in === 'query')
  const schema = {
    type: 'object',
    properties: Object.fromEntries(inQuery.map(one => [one.name, one.schema])),
    required: inQuery.filter(one => one.required).map(one => one.name)
  }
  const query = inQuery.length === 0 ? '' : `, query: Union[${named(`${base}Query`, schema, classes)}, None] = None`
  const head = inPath.map(one => `, ${one}: str`).join('')
  const place = `f"${path}"`
  const asked = `"${method.toUpperCase()}", ${place}, ${query === '' ? 'None' : 'query'}`
  const contents = Object.entries(operation.requestBody?.content ?? {})
  if (contents.length === 0) {
    return [`    def ${name}(self${head}${query}) -> "${bare(result)}":\n        return self.request(${asked})\n`]
  }
  return contents.map(([kind, content]) => {
    const suffix = KINDS[kind]
    if (suffix === undefined) throw new Error(`${operation.operationId}: a body of ${kind}`)
    const type = typeOf(content.schema, `${base}Body${pascal(suffix)}`, classes)
    const body =
      { '': 'json.dumps(body).encode()', _form: '*form(body)', _bytes: 'body, "application/octet-stream"' }[suffix]
    return `    def ${name}${suffix}(self${head}, body: ${type}${query}) -> "${
      bare(result)
    }":\n        return self.request(${asked}, ${body})\n`
  })
}

/** The type of a reply: all kinds of content of the statuses that `which` accepts. */
function contentType (responses, which, name, classes) {
  const types = []
  for (const [status, { content = {} }] of Object.entries(responses)) {
    if (!which(status)) continue
    types.push(...Object.values(content).map(({ schema }, index) => typeOf(schema, `${name}${index || ''}`, classes)))
  }
  return types.length === 0 ? 'Any' : union(types)
}

const union = types => {
  const own = [...new Set(types)]
  return own.length === 1 ? own[0] : `Union[${own.join(', ')}]`
}
const literal = value =>
  value === null ? 'None' : value === true ? 'True' : value === false ? 'False' : JSON.stringify(value)
const pascal = text => text.replace(/(?:^|[^A-Za-z0-9]+)([A-Za-z0-9])/g, (_, letter) => letter.toUpperCase())
/** Text within quotes. */
const bare = type => type.replaceAll('"', '')
