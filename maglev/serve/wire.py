"""Answers in the words of OpenAI's completions."""

import codecs
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from maglev.data.tokenizer import Tokenizer
from maglev.serve.rows import TokenScore
from maglev.serve.sessions import Session

# "end" is the end of the document, which OpenAI counts as a natural stop
REASONS = {"": None, "length": "length", "stop": "stop", "end": "stop"}


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """A token that is no whole text is written as OpenAI writes it."""
    content = tokenizer.token_bytes[token]
    if token == tokenizer.bos_id:
        return tokenizer.bos_token
    try:
        return content.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def token_offsets(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[int]:
    """How many characters are whole before each token."""
    decoder, length, found = codecs.getincrementaldecoder("utf-8")(errors="replace"), 0, []
    for token in tokens:
        found.append(length)
        length += len(decoder.decode(tokenizer.token_bytes[token]))
    return found


def logprobs_object(tokenizer: Tokenizer, scores: list[TokenScore], offset: int) -> dict[str, Any]:
    return {
        "tokens": [token_text(tokenizer, each.token) for each in scores],
        "token_logprobs": [each.logprob for each in scores],
        "top_logprobs": [
            {token_text(tokenizer, token): logprob for token, logprob in each.likeliest} for each in scores
        ],
        "text_offset": [offset + each.offset for each in scores],
    }


def session_object(session: Session) -> dict[str, Any]:
    return {"object": "session", "name": session.name, "bytes": session.nbytes, "used": int(session.used)}


@dataclass
class Usage:
    prompt: int
    cached: int = 0
    written: dict[int, int] = field(default_factory=dict)

    def object(self) -> dict[str, Any]:
        written = sum(self.written.values())
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": written,
            "total_tokens": self.prompt + written,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


@dataclass
class Envelope:
    """What every part of one answer begins with."""

    model: str
    id: str = field(default_factory=lambda: f"cmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def around(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        head = {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model}
        return {**head, "choices": choices, **more}


def choice_object(index: int, text: str, logprobs: dict[str, Any] | None, finished: str) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": REASONS[finished]}
