"""Writes the answers of /v1/responses, OpenAI's Responses API: one object, or typed events.

    answers = ResponseAnswers(about, wanted) # app.py writes with it, as with ChatAnswers of answers.py

Nothing is stored: a client sends the whole conversation with every request.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from ascendchat.serve.answers import About, Choice
from ascendchat.serve.pool import joined
from ascendchat.serve.prompts import GenerationRequest
from ascendchat.serve.tools import CallDelta
from ascendchat.serve.worker_messages import Chunk

Item = dict[str, Any]


class ResponseAnswers:
    """One answer: a message, calls of tools, or both."""

    def __init__(self, about: About, wanted: GenerationRequest) -> None:
        assert wanted.response is not None
        self.about, self.body = about, wanted.response
        self.choice = Choice(about, wanted, 0, everything=False)
        self.sampling = wanted.requests[0].sampling
        self.items: list[Item] = []
        self.reason = ""
        self.number = 0  # of the next event
        self._message: Item | None = None
        self._texts: list[str] = []

    def response(self, status: str) -> dict[str, Any]:
        """The response object."""
        body, done = self.body, status != "in_progress"
        prompt, count = len(self.choice.prompt), self.choice.count
        usage = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": self.choice.cached},
            "output_tokens": count,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + count,
        }
        choice = body.tool_choice or "auto"
        form = body.text.format if body.text and body.text.format else None
        return {
            "id": f"resp_{self.about.key}",
            "object": "response",
            "created_at": self.about.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self.about.model,
            "output": self.items if done else [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "service_tier": "default",
            "store": False,
            "temperature": self.sampling.temperature,
            "text": {"format": form.model_dump(by_alias=True, exclude_none=True) if form else {"type": "text"}},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.model_dump() for tool in body.tools or []],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": usage if done else None,
            "user": body.user,
            "ascendchat": {
                "weight_version": self.choice.version,
                "system_fingerprint": self.about.fingerprint,
                **({"timed_out": True} if self.reason == "timeout" else {}),
            },
        }

    @property
    def status(self) -> str:
        """Status of the finished response."""
        return "completed" if self.reason == "stop" else "incomplete"

    # ---- a stream ------------------------------------------------------------------------------

    def event(self, kind: str, **fields: Any) -> bytes:
        """Write one event with its number."""
        content = json.dumps({"type": kind, "sequence_number": self.number, **fields})
        self.number += 1
        return f"event: {kind}\ndata: {content}\n\n".encode()

    def opening(self) -> bytes:
        """Nothing: the first part brings the first events, which are numbered."""
        return b""

    def chunk(self, index: int, chunk: Chunk) -> bytes:
        """Write the events of a chunk."""
        out = []
        if not self.number:
            started = self.response("in_progress")
            out += [self.event(f"response.{kind}", response=started) for kind in ("created", "in_progress")]
        self.choice.take(chunk)
        self.reason = chunk.finish_reason
        if text := "".join(piece.text for piece in chunk.pieces if piece.kind == "text"):
            out += [self._open_message(), self._text(text)]
        if self.choice.calls is not None:
            out += [self._call(delta) for delta in self.choice.calls.feed(chunk.ids, over=bool(chunk.finish_reason))]
        if chunk.finish_reason:
            if not self.items:
                out.append(self._open_message())
            out.append(self._close())
        return b"".join(out)

    def closing(self) -> bytes:
        """Write the whole answer once more."""
        return self.event(f"response.{self.status}", response=self.response(self.status))

    def _open_message(self) -> bytes:
        if self._message is not None:
            return b""
        closed = self._close()
        self._message = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "status": "in_progress",
            "role": "assistant",
            "content": [],
        }
        self.items.append(self._message)
        place = {"item_id": self._message["id"], "output_index": len(self.items) - 1, "content_index": 0}
        empty = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        added = self.event("response.output_item.added", output_index=len(self.items) - 1, item=self._message)
        begun = self.event("response.content_part.added", **place, part=empty)
        head = json.dumps({"type": "response.output_text.delta", **place, "logprobs": []})
        self._delta = f"event: response.output_text.delta\ndata: {head[:-1]}".encode()
        return closed + added + begun

    def _text(self, text: str) -> bytes:
        self._texts.append(text)
        self.number += 1
        return b'%b, "sequence_number": %d, "delta": %b}\n\n' % (self._delta, self.number - 1, quoted(text).encode())

    def _call(self, delta: CallDelta) -> bytes:
        if not delta.id:
            item = self.items[-1]
            item["arguments"] += delta.arguments
            place = {"item_id": item["id"], "output_index": len(self.items) - 1}
            return self.event("response.function_call_arguments.delta", **place, delta=delta.arguments)
        closed = self._close()
        item = {"id": f"fc_{secrets.token_hex(12)}", "type": "function_call", "status": "in_progress"}
        item.update({"call_id": delta.id, "name": delta.name, "arguments": ""})
        self.items.append(item)
        return closed + self.event("response.output_item.added", output_index=len(self.items) - 1, item=item)

    def _close(self) -> bytes:
        """End the item under way."""
        if not self.items:
            return b""
        item, at = self.items[-1], len(self.items) - 1
        item["status"] = "completed" if self.reason in ("", "stop") else "incomplete"
        place = {"item_id": item["id"], "output_index": at}
        out = []
        if item is self._message:
            text = {"type": "output_text", "text": "".join(self._texts), "annotations": [], "logprobs": []}
            item["content"], self._message, self._texts = [text], None, []
            place["content_index"] = 0
            out.append(self.event("response.output_text.done", **place, text=text["text"], logprobs=[]))
            out.append(self.event("response.content_part.done", **place, part=text))
        else:
            given = {"name": item["name"], "arguments": item["arguments"]}
            out.append(self.event("response.function_call_arguments.done", **place, **given))
        out.append(self.event("response.output_item.done", output_index=at, item=item))
        return b"".join(out)

    # ---- all at once ---------------------------------------------------------------------------

    def whole(self, chunks: Sequence[Sequence[Chunk]]) -> dict[str, Any]:
        """The object of an answer at once."""
        self.chunk(0, joined(chunks[0]))
        return self.response(self.status)
