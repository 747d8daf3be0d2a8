"""A chat request with functions, through the speech recogniser, to the very text of SmolLM2's prompt."""

from __future__ import annotations

from omni_bus.stages.ar.stage import ARStage
from omni_bus.stages.cascade.llm import SmolProgram
from omni_bus.stages.cascade.payloads import Prompt
from tests.support.cascade import Driver, chunk
from tests.support.chat_functions import chat_input

CLOCK = (
    '{"type":"function","function":{"name":"clock","description":"The time.",'
    '"parameters":{"type":"object","properties":{"zone":{"type":"string"}}}}}'
)
DICE = '{"type":"function","function":{"name":"dice"}}'
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
</tool_response>
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
        f"<|im_start|>system\n{words}\n\nYou can call these functions; each line is the JSON description of one:\n"
        f"<tools>\n{listed}\n</tools>\n"
        "To call one, write a JSON object with its name and arguments, and nothing else, in this form:\n"
        '<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call><|im_end|>\n'
    )


def test_the_prompt_of_a_chat_with_functions(asr: Driver, llm: Driver) -> None:
    assert isinstance(llm.stage, ARStage) and isinstance(llm.stage.program, SmolProgram)
    chat = llm.stage.program._chat

    def prompt(**fields: object) -> str:
        request = asr.open()
        asr.stage.feed(request, chunk("client->asr", chat_input("cascade", **fields)))
        asr.run()
        asr.finished(request)
        [sent] = asr.outputs(request, "asr->llm")
        assert isinstance(sent.payload, Prompt)
        ids = chat.prompt(sent.payload.turns, "Say little.", sent.payload.tools)
        return str(chat.backend_tokenizer.decode(ids, skip_special_tokens=False))

    assert prompt() == system("Be brief.", CLOCK, DICE) + TURNS
    only = {"type": "function", "function": {"name": "dice"}}
    asked = "Be brief.\n\nAnswer by calling the function dice, with no other words."
    assert prompt(tool_choice=only) == system(asked, DICE) + TURNS
    assert prompt(tool_choice="none") == "<|im_start|>system\nBe brief.<|im_end|>\n" + TURNS
