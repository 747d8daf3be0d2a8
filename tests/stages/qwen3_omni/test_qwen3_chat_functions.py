"""A chat request with functions to the very text of Qwen3-Omni's prompt."""

from __future__ import annotations

from omni_bus.stages.qwen3_omni.processor import Processor
from tests.support.chat_functions import chat_input
from tests.support.qwen3_omni import Reference
from tests.support.stage_pipeline import StagePipeline

CLOCK = (
    '{"type": "function", "function": {"name": "clock", "description": "The time.", '
    '"parameters": {"type": "object", "properties": {"zone": {"type": "string"}}}}}'
)
TURNS = """<|im_start|>user
What time is it?<|im_end|>
<|im_start|>assistant
<tool_call>
{"name": "clock", "arguments": {"zone":  "UTC"}}
</tool_call>
<tool_call>
{"name": "dice", "arguments": {}}
</tool_call><|im_end|>
<|im_start|>user
<tool_response>
12:00
</tool_response><|im_end|>
<|im_start|>user
<tool_response>
6
</tool_response><|im_end|>
<|im_start|>assistant
Noon, and a six.<|im_end|>
<|im_start|>user
Again.<|im_end|>
<|im_start|>assistant
"""


def system(words: str, *tools: str) -> str:
    listed = "\n".join(tools)
    return (
        f"<|im_start|>system\n{words}\n\nFunctions that may be called, one JSON signature a line:\n<tools>\n{listed}\n</tools>\n"
        "A call is a JSON object with name and arguments between <tool_call> and </tool_call>.<|im_end|>\n"
    )


def test_the_prompt_of_a_chat_with_functions(omni_pipeline: StagePipeline, reference: Reference) -> None:
    processor = omni_pipeline.stages["processor"]._processor  # type: ignore[attr-defined]
    assert isinstance(processor, Processor)

    def prompt(**fields: object) -> str:
        ids = processor.prepare(chat_input("qwen3_omni", **fields), {}).token_ids
        return str(reference.tokenizer.decode(ids))

    dice = '{"type": "function", "function": {"name": "dice"}}'
    assert prompt() == system("Be brief.", CLOCK, dice) + TURNS
    only = {"type": "function", "function": {"name": "dice"}}
    asked = "Be brief.\n\nAnswer by calling the function dice, with no other words."
    assert prompt(tool_choice=only) == system(asked, dice) + TURNS
    asked = "Be brief.\n\nAnswer by calling one of the functions, with no other words."
    assert prompt(tool_choice="required") == system(asked, CLOCK, dice) + TURNS
    assert prompt(tool_choice="none") == "<|im_start|>system\nBe brief.<|im_end|>\n" + TURNS
