const PATH = '{"city": "a/b \\"c\\" {[", "where": {"deep": [1, {"x": "}"}]}}'
const ZURICH = '{"city": "Zürich 🏔"}'
const dsml = (section: string, body: string): string => `<｜DSML｜${section}>\n${body}\n</｜DSML｜${section}>`
const v3 = (name: string, json: string): string =>
  `<｜tool▁call▁begin｜>function<｜tool▁sep｜>${name}\n\`\`\`json\n${json}\n\`\`\`<｜tool▁call▁end｜>`
const v31 = (name: string, json: string): string =>
  `<｜tool▁call▁begin｜>${name}<｜tool▁sep｜>${json}<｜tool▁call▁end｜>`
const deepseek = (...calls: string[]): string => `<｜tool▁calls▁begin｜>${calls.join('\n')}<｜tool▁calls▁end｜>`
const kimi = (id: string, json: string): string =>
  `<|tool_call_begin|>${id}<|tool_call_argument_begin|>${json}<|tool_call_end|>`
const kimis = (...calls: string[]): string => `<|tool_calls_section_begin|>${calls.join('')}<|tool_calls_section_end|>`
const hermes = (json: string): string => `<tool_call>\n${json}\n</tool_call>`
const coder = (name: string, ...values: [string, string][]): string =>
  `<tool_call>\n<function=${name}>\n${
    values.map(([key, value]) => `<parameter=${key}>\n${value}\n</parameter>\n`).join('')
  }</function>\n</tool_call>`
const glm = (name: string, gap: string, ...values: [string, string][]): string =>
  `<tool_call>${name}${gap}${
    values.map(([key, value]) => `<arg_key>${key}</arg_key>${gap}<arg_value>${value}</arg_value>${gap}`).join('')
  }</tool_call>`
const oss = (name: string, json: string, end = '<|call|>'): string =>
  `<|channel|>commentary to=functions.${name} <|constrain|>json<|message|>${json}${end}`

/** One reply: the text, what of it is content, and its calls. */
export type Case = [text: string, content: string, ...calls: [name: string, args: string][]]

/** Replies by the name of a format. */
export const CASES: Record<string, Case[]> = {
  hermes: [
    ['plain < text <tool', 'plain < text <tool'],
    [' \n', ' \n'],
    ['Look:\n' + hermes(`{"name": "now", "arguments": ${PATH}}`), 'Look:', ['now', PATH]],
    [
      [hermes(`{"name": "free", "arguments": ${ZURICH}}`), hermes('{"arguments": {}, "name": "now"}')].join('\n'),
      '',
      ['free', ZURICH],
      ['now', '{}']
    ],
    ['<tool_call>{"name":"now"}</tool_call> after', ' after', ['now', '{}']],
    // The number would not survive a JavaScript number.
    ['<tool_call>{"name":"f","parameters":{"n":12345678901234567890.10}}', '', [
      'f',
      '{"n":12345678901234567890.10}'
    ]],
    [
      hermes('{"name": "write", "arguments": {"text": "use </tool_call> \\" here"}}'),
      '',
      ['write', '{"text": "use </tool_call> \\" here"}']
    ],
    ['a ' + hermes('{"name": "now", }') + ' b', 'a ' + hermes('{"name": "now", }') + ' b'],
    [
      hermes('{"name": "f", "arguments": {"a": "open}}') + '\n' + hermes('{"name": "now", "arguments": {}}'),
      hermes('{"name": "f", "arguments": {"a": "open}}'),
      ['now', '{}']
    ],
    ['The tag <tool_call> is one. ' + hermes('{"name": "now"}'), 'The tag <tool_call> is one.', ['now', '{}']],
    ['<tool_call>{"name": "now", "argum', '<tool_call>{"name": "now", "argum'],
    ['<tool_call>[{"name": "now"}, {"name": "f", "arguments": [1, 2]}]</tool_call>', '', ['now', '{}'], [
      'f',
      '[1, 2]'
    ]],
    [hermes('{"name": 5}'), hermes('{"name": 5}')],
    [hermes('"now"'), hermes('"now"')],
    [hermes(''), hermes('')]
  ],
  qwen3_coder: [
    [
      'I call.\n\n' + coder(
        'get_weather',
        ['city', ' Rome\n\n  Milan'],
        ['days', '3'],
        ['ratio', '1.50'],
        ['exact', 'True'],
        ['where', '{"x": [1]}'],
        ['tags', "['a']"],
        ['either', '7'],
        ['unit', 'C'],
        ['other', '5']
      ),
      'I call.',
      [
        'get_weather',
        '{"city": " Rome\\n\\n  Milan", "days": 3, "ratio": 1.50, "exact": true, "where": {"x": [1]}, ' +
        '"tags": "[\'a\']", "either": 7, "unit": "C", "other": "5"}'
      ]
    ],
    [coder('now') + '\n' + coder('free', ['a', 'NULL'], ['b', '<b>🏔</b>']), '', ['now', '{}'], [
      'free',
      '{"a": null, "b": "<b>🏔</b>"}'
    ]],
    [
      '<tool_call><function=get_weather><parameter=city>\nOslo\n<parameter=days>x</function></tool_call>',
      '',
      ['get_weather', '{"city": "Oslo", "days": "x"}']
    ],
    ['<function=now>\n</function>\n</tool_call>\nDone', '\nDone', ['now', '{}']],
    ['<function=now></function> and', ' and', ['now', '{}']],
    ['<tool_call>\n<function=now>\n<parameter=a>\ncut', '<tool_call>\n<function=now>\n<parameter=a>\ncut'],
    ['<tool_call>nothing</tool_call> x', '<tool_call>nothing</tool_call> x']
  ],
  glm45: [
    [
      'So\n' + glm('get_weather', '\n', ['city', '5'], ['days', '5'], ['exact', 'false'], ['other', '{"a": 1}']),
      'So',
      ['get_weather', '{"city": "5", "days": 5, "exact": false, "other": {"a": 1}}']
    ],
    [
      glm('get_weather', '', ['city', 'Zürich </tool_call> 🏔'], ['tags', '[1, 2]']) + glm('now', ''),
      '',
      ['get_weather', '{"city": "Zürich </tool_call> 🏔", "tags": [1, 2]}'],
      ['now', '{}']
    ],
    [glm('free', '\n', ['a', 'null'], ['b', 'text']), '', ['free', '{"a": null, "b": "text"}']],
    ['<tool_call>now', '<tool_call>now'],
    [glm('two words', ''), glm('two words', '')],
    ['<tool_call>f<arg_key>a</arg_key></tool_call>x', '<tool_call>f<arg_key>a</arg_key></tool_call>x']
  ],
  deepseekv3: [
    ['Hm.\n' + deepseek(v3('get_weather', ZURICH), v3('now', '{}')), 'Hm.', ['get_weather', ZURICH], ['now', '{}']],
    [deepseek(v3('now', PATH)) + '\nend', '\nend', ['now', PATH]],
    [deepseek(v3('bad', '{'), v3('now', '{}')), v3('bad', '{'), ['now', '{}']],
    [deepseek(v3('bad', '{')), deepseek(v3('bad', '{'))],
    ['<｜tool▁calls▁begin｜>' + v3('now', '{}') + '<｜tool▁call▁begin｜>functi', '<｜tool▁call▁begin｜>functi', [
      'now',
      '{}'
    ]]
  ],
  deepseekv31: [
    ['A' + deepseek(v31('get_weather', ZURICH), v31('now', PATH)), 'A', ['get_weather', ZURICH], ['now', PATH]],
    [
      deepseek('<｜tool▁call▁begin｜>now{}<｜tool▁call▁end｜>'),
      deepseek('<｜tool▁call▁begin｜>now{}<｜tool▁call▁end｜>')
    ]
  ],
  deepseekv32: [
    [
      'Text\n\n' + dsml(
        'function_calls',
        '<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="true"> é "q" </｜DSML｜parameter>\n' +
          '<｜DSML｜parameter name="b" string="false">{"n": 1.0}</｜DSML｜parameter>\n</｜DSML｜invoke>\n' +
          '<｜DSML｜invoke name="g">\n{"x": [2]}\n</｜DSML｜invoke>'
      ),
      'Text',
      ['f', '{"a": " é \\"q\\" ", "b": {"n": 1.0}}'],
      ['g', '{"x": [2]}']
    ],
    // A string that looks like JSON stays a string.
    [
      dsml(
        'function_calls',
        '<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="true">42</｜DSML｜parameter>\n' +
          '<｜DSML｜parameter name="b" string="true">{"n": 1}</｜DSML｜parameter>\n</｜DSML｜invoke>'
      ),
      '',
      ['f', '{"a": "42", "b": "{\\"n\\": 1}"}']
    ],
    [
      dsml('function_calls', '<｜DSML｜invoke name="f">{"x": </｜DSML｜invoke>'),
      dsml('function_calls', '<｜DSML｜invoke name="f">{"x": </｜DSML｜invoke>')
    ]
  ],
  deepseekv4: [
    [
      dsml('tool_calls', '<｜DSML｜invoke name="now"/>\n<｜DSML｜invoke name="f">\n</｜DSML｜invoke>') + ' ok',
      ' ok',
      ['now', '{}'],
      ['f', '{}']
    ],
    [
      dsml(
        'tool_calls',
        '<｜DSML｜invoke name="f"><｜DSML｜parameter name="a">1</｜DSML｜invoke><｜DSML｜invoke name="now"/>'
      ),
      '<｜DSML｜invoke name="f"><｜DSML｜parameter name="a">1</｜DSML｜invoke>',
      ['now', '{}']
    ]
  ],
  kimi_k2: [
    [
      'Go.' + kimis(kimi('functions.get_weather:0', ZURICH), kimi(' now:13 ', PATH)),
      'Go.',
      ['get_weather', ZURICH],
      ['now', PATH]
    ],
    [kimis(kimi('7', '{}'), kimi('functions.now:8', '{}')), kimi('7', '{}'), ['now', '{}']],
    [
      '<|tool_calls_section_begin|> no <|tool_calls_section_end|>',
      '<|tool_calls_section_begin|> no <|tool_calls_section_end|>'
    ]
  ],
  'gpt-oss': [
    [oss('get_weather', ZURICH), '', ['get_weather', ZURICH]],
    ['Fine. ' + oss('now', PATH, '<|end|>') + '<|start|>assistant' + oss('f.g-h', '{}', ''), 'Fine.', ['now', PATH], [
      'f.g-h',
      '{}'
    ]],
    ['<|start|>assistant to=functions.now<|channel|>commentary<|message|>{}', '', ['now', '{}']],
    ['<|channel|>commentary to=functions.now<|message|>{}<|start|>', '<|start|>', ['now', '{}']],
    [oss('now', '{'), oss('now', '{')],
    ['<|channel|>final<|message|>Hi<|return|>', '<|channel|>final<|message|>Hi<|return|>']
  ],
  llama3: [
    ['{"name": "get_weather", "parameters": ' + ZURICH + '}', '', ['get_weather', ZURICH]],
    [
      'Sure <|python_tag|>{"name": "now", "parameters": {}}; {"name": "f", "arguments": ' + PATH + '}',
      'Sure',
      ['now', '{}'],
      ['f', PATH]
    ],
    [' {"name": "now"} then', ' then', ['now', '{}']],
    ['{"name": "now"} ; then', ' ; then', ['now', '{}']],
    ['{"name": "now"};', ';', ['now', '{}']],
    ['{"name": "now"}; {"cut": ', '; {"cut": ', ['now', '{}']],
    ['{"answer": 42} {"name": "now"}', '{"answer": 42} {"name": "now"}'],
    ['a {"name": "now"}', 'a {"name": "now"}'],
    ['<|python_tag|>print(1)', '<|python_tag|>print(1)']
  ],
  mistral: [
    ['Ok [TOOL_CALLS] [{"name": "now", "arguments": {}}, {"name": "f", "arguments": ' + PATH + '}]', 'Ok', [
      'now',
      '{}'
    ], [
      'f',
      PATH
    ]],
    ['[TOOL_CALLS]get_weather[ARGS]' + ZURICH + '[TOOL_CALLS]now[CALL_ID]a1B2c3D4e[ARGS]{} ok', ' ok', [
      'get_weather',
      ZURICH
    ], ['now', '{}']],
    ['[TOOL_CALLS]now{"a": [1]}', '', ['now', '{"a": [1]}']],
    ['[TOOL_CALLS] none', '[TOOL_CALLS] none'],
    ['[TOOL_CALLS][{"nam": 1}] x', '[TOOL_CALLS][{"nam": 1}] x'],
    ['[TOOL', '[TOOL']
  ]
}
