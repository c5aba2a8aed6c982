"""Conversations and preferences of Python's standard library, and a tokenizer with a chat template."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

__all__ = ["CHATML", "Message", "conversations_of", "preferences_of", "small_tokenizer"]

Message = dict[str, str]

CHATML = """\
{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\n' }}
{%- if message['role'] == 'assistant' %}
{% generation %}
{{ message['content'] + '<|im_end|>' }}
{%- endgeneration %}
{{ '\n' }}
{%- else %}
{{ message['content'] + '<|im_end|>\n' }}
{%- endif %}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\n' }}
{%- endif %}
"""


def conversations_of(pairs: Sequence[tuple[str, str]]) -> list[list[Message]]:
    """Conversations of one to three functions each, every other one with a system message.

    Args:
        pairs: of signature with docstring, and body.
    """
    found: list[list[Message]] = []
    place = 0
    while place < len(pairs):
        turns = 1 + len(found) % 3
        told = [{"role": "system", "content": "Write Python."}] if len(found) % 2 else []
        for ask, answer in pairs[place : place + turns]:
            told += [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]
        found.append(told)
        place += turns
    return found


def preferences_of(pairs: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
    """For each function its own body, and the same in capitals: as long, and easily told apart."""
    return [
        {"prompt": ask + "\n", "chosen": answer, "rejected": answer.upper()}
        for ask, answer in pairs
    ]


@cache
def small_tokenizer(template: str = CHATML) -> Any:
    """A transformers tokenizer of bytes, with a chat template.

    Args:
        template: Jinja.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    engine = Tokenizer(models.BPE({byte: place for place, byte in enumerate(alphabet)}, []))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    engine.add_special_tokens(["<|im_start|>", "<|im_end|>", "<pad>"])
    made: Any = PreTrainedTokenizerFast
    return made(
        tokenizer_object=engine, eos_token="<|im_end|>", pad_token="<pad>", chat_template=template
    )
