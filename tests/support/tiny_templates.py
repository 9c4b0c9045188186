"""Chat templates of the tiny checkpoints: each shows one habit of real templates that a chat server must survive."""

from __future__ import annotations

_PLAIN_TURN = "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
_GENERATION = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"

CHATML = "{%- for message in messages %}" + _PLAIN_TURN + "{%- endfor %}" + _GENERATION

# As SmolLM2 and Qwen2.5 do: a system turn that the client never sent.
DEFAULT_SYSTEM = (
    "{%- if messages[0]['role'] != 'system' %}"
    "{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}"
    "{%- endif %}" + CHATML
)

# As Qwen3 does: reasoning is kept after the last user query and dropped before it, so history is rewritten each turn.
THINK_STRIP = (
    "{%- set ns = namespace(last_query=-1) %}"
    "{%- for message in messages %}"
    "{%- if message['role'] == 'user' %}{%- set ns.last_query = loop.index0 %}{%- endif %}"
    "{%- endfor %}"
    "{%- for message in messages %}"
    "{%- if message['role'] == 'assistant' and '</think>' in message['content'] and loop.index0 < ns.last_query %}"
    "{{- '<|im_start|>assistant\\n' + message['content'].split('</think>')[-1].lstrip('\\n') + '<|im_end|>\\n' }}"
    "{%- else %}" + _PLAIN_TURN + "{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}"
)

# As Llama 3.1 and Granite do: the prompt changes with the calendar.
DATE = (
    "{{- '<|im_start|>system\\nToday is ' + strftime_now('%d %B %Y') + '.<|im_end|>\\n' }}"
    "{%- for message in messages %}" + _PLAIN_TURN + "{%- endfor %}" + _GENERATION
)

# As strict templates do when roles do not alternate: any assistant turn is an error.
RAISING = (
    "{%- for message in messages %}"
    "{%- if message['role'] == 'assistant' %}{{- raise_exception('assistant turns are not allowed here') }}{%- endif %}"
    + _PLAIN_TURN
    + "{%- endfor %}"
    + _GENERATION
)

# As Qwen2.5 does: tools in a system turn, calls and results between tags.
TOOLS = (
    "{%- if tools %}"
    "{{- '<|im_start|>system\\n# Tools\\n<tools>' }}"
    "{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}"
    "{{- '\\n</tools><|im_end|>\\n' }}"
    "{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message['role'] == 'tool' %}"
    "{{- '<|im_start|>user\\n<tool_response>\\n' + message['content'] + '\\n</tool_response><|im_end|>\\n' }}"
    "{%- elif message['role'] == 'assistant' and message['tool_calls'] %}"
    "{{- '<|im_start|>assistant' }}"
    "{%- if message['content'] %}{{- '\\n' + message['content'] }}{%- endif %}"
    "{%- for call in message['tool_calls'] %}"
    "{%- set call = call['function'] if call['function'] else call %}"
    "{%- set arguments = call['arguments'] if call['arguments'] is string else (call['arguments'] | tojson) %}"
    "{{- '\\n<tool_call>\\n{\"name\": \"' + call['name'] + '\", \"arguments\": ' + arguments + '}\\n</tool_call>' }}"
    "{%- endfor %}"
    "{{- '<|im_end|>\\n' }}"
    "{%- else %}" + _PLAIN_TURN + "{%- endif %}"
    "{%- endfor %}" + _GENERATION
)

TEMPLATES = {
    "chatml": CHATML,
    "default_system": DEFAULT_SYSTEM,
    "think_strip": THINK_STRIP,
    "date": DATE,
    "raising": RAISING,
    "tools": TOOLS,
}
