"""Chat templates of public models, as the package trl ships them, each with a small tokenizer that knows its special tokens."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import trl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

FOLDER = Path(trl.__file__).parent / "chat_templates"
_SPECIAL = re.compile(
    r"<\|[^|<>\s]+\|>|<\|\w+>|<\w+\|>|<｜[^｜]+｜>|</?(?:start_of_turn|end_of_turn|bos|eos|s)>|\[/?(?:gMASK|INST|TOOL_CALLS|ARGS)\]"
    r"|<sop>"
)
_MISTRAL = """{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for m in messages %}
{%- if m.role == "tool" %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]
{%- elif m.role != "assistant" %}[INST]{{ m.content }}[/INST]
{%- else %}{{ m.content }}{% if m.tool_calls %}CALLS{% endif %}</s>{% endif %}
{%- endfor %}"""
_MISTRAL_CALLS = {
    "mistral_list": """[TOOL_CALLS] [{% for c in m.tool_calls %}{"name": "{{ c.function.name }}", "arguments":
{{- " " }}{{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}{{ "" if loop.last else ", " }}{% endfor %}]""",
    "mistral_args": """{% for c in m.tool_calls %}[TOOL_CALLS]{{ c.function.name }}[ARGS]
{{- c.function.arguments | tojson }}{% endfor %}""",
}
"""Mistral's two forms of calls, in a template of ours: the package has none of them."""


@functools.cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with a few hundred merges, learned from the template's own text."""
    if name in _MISTRAL_CALLS:
        template = _MISTRAL.replace("CALLS{", _MISTRAL_CALLS[name] + "{")
    else:
        template = (FOLDER / f"{name}.jinja").read_text()
    special = sorted({*_SPECIAL.findall(template), "<bos>", "<eos>"})
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([_SPECIAL.sub(" ", template)], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        additional_special_tokens=special,
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )
