"""PromptEncoder: text and conversations to token ids, short ones at once, long ones in a thread."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import orjson
import tokenizers

from tokring.server.chat_template import ChatTemplate, ChatTemplateError
from tokring.server.special_text import SpecialTextGuard

# encode holds the GIL, encode_batch_fast does not; below this many characters a thread costs more than it saves.
INLINE_CHARS = 2_000
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What a chat template is rendered from; all values JSON-like."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, str]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: dict[str, Any] = field(default_factory=dict)

    def size(self) -> int:
        """Bytes of everything a client sent, as JSON: what rendering and encoding take time for."""
        return len(orjson.dumps([self.messages, self.tools, self.documents, self.template_kwargs]))


class PromptEncoder:
    """One tokenizer and chat template, shared by every request of the process."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        chat_template: ChatTemplate | None,
    ) -> None:
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
        self.max_token_chars = max(map(len, tokenizer.get_vocab(with_added_tokens=True)), default=1)
        self._guard = SpecialTextGuard(tokenizer)
        self._executor = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize")

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def encode_texts(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of each text; a beginning-of-text token where the model wants one and it was not switched off."""
        return await self._run(sum(map(len, texts)), lambda: self._encode_texts(texts, add_special_tokens))

    async def encode_conversation(self, conversation: Conversation) -> list[int]:
        """Token ids of the rendered conversation. Raises ChatTemplateError."""
        return await self._run(conversation.size(), lambda: self._encode_conversation(conversation))

    async def render_conversation(self, conversation: Conversation) -> str:
        """The prompt text alone. Raises ChatTemplateError."""
        return await self._run(conversation.size(), lambda: self._render(conversation))

    def token_text(self, token_id: int) -> str:
        """The text of one token, special ones included."""
        return self.tokenizer.decode([token_id], skip_special_tokens=False)

    async def token_strings(self, token_ids: Sequence[int]) -> list[str | None]:
        """Each token as the vocabulary spells it."""
        id_to_token = self.tokenizer.id_to_token
        return await self._run(4 * len(token_ids), lambda: [id_to_token(token_id) for token_id in token_ids])

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of token ids, nothing stripped."""
        return await self._run(
            4 * len(token_ids), lambda: self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        )

    async def _run(self, num_chars: int, work: Callable[[], _Result]) -> _Result:
        if num_chars < INLINE_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def _encode_texts(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        encodings = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [list(encoding.ids) for encoding in encodings]

    def _encode_conversation(self, conversation: Conversation) -> list[int]:
        client_text = [conversation.messages, conversation.tools, conversation.documents, conversation.template_kwargs]
        if not self._guard.found_in(client_text):
            [encoding] = self.tokenizer.encode_batch_fast([self._render(conversation)], add_special_tokens=False)
            return list(encoding.ids)
        return self._guard.encode(self._render(self._protected(conversation)))

    def _protected(self, conversation: Conversation) -> Conversation:
        protect = self._guard.protect
        return Conversation(
            messages=protect(conversation.messages),
            tools=protect(conversation.tools),
            documents=protect(conversation.documents),
            add_generation_prompt=conversation.add_generation_prompt,
            continue_final_message=conversation.continue_final_message,
            template_kwargs=protect(conversation.template_kwargs),
        )

    def _render(self, conversation: Conversation) -> str:
        if self.chat_template is None:
            raise ChatTemplateError("The model has no chat template; use /v1/completions or --chat-template.")
        return self.chat_template.render(
            conversation.messages,
            tools=conversation.tools,
            documents=conversation.documents,
            add_generation_prompt=conversation.add_generation_prompt,
            continue_final_message=conversation.continue_final_message,
            kwargs=conversation.template_kwargs,
        )
