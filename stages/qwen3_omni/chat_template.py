"""The chat template of a fixture checkpoint: ChatML with audio, image and video parts, and tools in the Hermes form.

A media part becomes its start mark, one placeholder and its end mark; the processor repeats the placeholder to the media's length.
Tool results are user turns, as Qwen's models are trained on. There is no default system prompt.
"""

_TOOLS = (
    "{%- if tools -%}"
    "{{- '<|im_start|>system\n' -}}"
    "{%- if messages[0].role == 'system' -%}{{- body(messages[0].content) + '\n\n' -}}{%- endif -%}"
    "{{- 'Functions that may be called, one JSON signature a line:\n<tools>' -}}"
    "{%- for tool in tools -%}{{- '\n' + (tool | tojson) -}}{%- endfor -%}"
    "{{- '\n</tools>\nA call is a JSON object with name and arguments between <tool_call> and </tool_call>.<|im_end|>\n' -}}"
    "{%- endif -%}"
)
_BODY = (
    "{%- macro body(content) -%}"
    "{%- if content is string -%}{{- content -}}"
    "{%- elif content -%}"
    "{%- for part in content -%}"
    "{%- if part.type in ('audio', 'input_audio', 'audio_url') -%}{{- '<|audio_start|><|audio_pad|><|audio_end|>' -}}"
    "{%- elif part.type in ('image', 'image_url') -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}"
    "{%- elif part.type in ('video', 'video_url') -%}{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}"
    "{%- elif part.type == 'text' -%}{{- part.text -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- endif -%}"
    "{%- endmacro -%}"
)
_TURNS = (
    "{%- for message in messages -%}"
    "{%- if message.role == 'tool' -%}"
    "{{- '<|im_start|>user\n<tool_response>\n' + body(message.content) + '\n</tool_response><|im_end|>\n' -}}"
    "{%- elif not (tools and loop.first and message.role == 'system') -%}"
    "{{- '<|im_start|>' + message.role + '\n' + body(message.content) -}}"
    "{%- for call in message.tool_calls or [] -%}"
    "{%- set function = call.function or call -%}"
    "{%- set arguments = function.arguments if function.arguments is string else function.arguments | tojson -%}"
    "{%- if not loop.first or message.content -%}{{- '\n' -}}{%- endif -%}"
    "{{- '<tool_call>\n{\"name\": \"' + function.name + '\", \"arguments\": ' + arguments + '}\n</tool_call>' -}}"
    "{%- endfor -%}"
    "{{- '<|im_end|>\n' -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
)
CHAT_TEMPLATE = _BODY + _TOOLS + _TURNS + "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
