"""Chat: a conversation into exactly the token ids that the server sees, and the mask of the reply tokens.

Text is rendered by the target's own chat template and encoded as SGLang's chat endpoint does it: render to text,
then encode without added special tokens. One difference: where the tokenizer wants a BOS and the template has none,
one is put in front.

The mask rule. For a trained reply the mask begins where `render(history, add_generation_prompt=True)` ends, counted
in tokens, and runs through the reply's end-of-turn token. Both that history and the render up to the reply's end must
be token prefixes of the whole render; else the template rewrites history (drops earlier thinking, say) and every
reply becomes a row of its own; a reply whose own history is no prefix either is dropped. Nothing is searched for in
rendered text.

Control tokens in text. "<|im_end|>" typed by a user would be encoded as the real end of a turn, here and in the
server. Such a conversation is dropped with the reason "control token in text": a control token in a row is always
the template's own, which is what makes the end of a reply certain. Tokens that the tokenizer does not mark as special
(often "<think>", "<tool_call>") are ordinary text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from eagle3lib import targets
from eagle3lib.conversations import Conversation, Drop, Message, Record, Rendered, Tokenised, spoken_parts
from eagle3lib.errors import Eagle3Error, ParamError

THINK_END = "</think>"
NOT_A_PREFIX = "history is not a token prefix of the reply's render"
TOO_LONG = "no supervised tokens within max_tokens"
TOO_SHORT = "reply too short to train on"


@dataclass(frozen=True)
class Row:
    """One training row. loss_mask[t] is True iff token t belongs to a trained reply, through its end-of-turn token."""

    input_ids: list[int]
    loss_mask: list[bool]

    @property
    def n_supervised(self) -> int:
        return sum(self.loss_mask)


def fit(row: Row, max_tokens: int) -> Row:
    """The row cut to max_tokens. Drop when no two neighbouring supervised tokens remain: the first label of a reply
    is its second token, so one alone trains nothing."""
    if not _has_label(row.loss_mask):
        raise Drop(TOO_SHORT)
    if len(row.input_ids) <= max_tokens:
        return row
    cut = Row(row.input_ids[:max_tokens], row.loss_mask[:max_tokens])
    if not _has_label(cut.loss_mask):
        raise Drop(TOO_LONG, f"{len(row.input_ids)} tokens")
    return cut


def _has_label(mask: Sequence[bool]) -> bool:
    return b"\x01\x01" in bytes(mask)


class Chat:
    """The target's chat template and tokenizer, with the probes that tell how its replies begin and end.

    end_of_turn: the token that closes a reply, None when the template writes none. stop_ids: every token at which the
    target stops. generation_prompt: the ids that the template puts before a reply. control_tokens: texts of the
    special tokens. fingerprint: hashes that name the target, its tokenizer and template, and the template options.
    context: the longest sequence that the target takes [tokens]; None: not known.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        stop_ids: Iterable[int] = (),
        template_options: dict[str, Any] | None = None,
        fingerprint: dict[str, str] | None = None,
        context: int | None = None,
    ):
        if not getattr(tokenizer, "is_fast", False):
            raise Eagle3Error(f"tokenizer {type(tokenizer).__name__} has no fast (tokenizers) backend, which the loss mask needs")
        self.tokenizer, self.context = tokenizer, context
        self.template_options = dict(template_options or {})
        self.fingerprint = {**(fingerprint or {}), "template_options": json.dumps(self.template_options, sort_keys=True)}
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()  # some tokenizer.json files carry a length limit; rows are cut by `fit` alone
        self._backend.no_padding()
        self._encode_cached = lru_cache(4096)(self._encode)
        added = {i: t.content for i, t in tokenizer.added_tokens_decoder.items() if t.special}
        self.special_ids = frozenset(added) | frozenset(tokenizer.all_special_ids)
        self.control_tokens = sorted({*added.values(), *tokenizer.all_special_tokens} - {""}, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, self.control_tokens)) or r"(?!)")
        self._wants_bos = tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
        self.generation_prompt, self.end_of_turn = self._probe()
        known = {*stop_ids, tokenizer.eos_token_id, self.end_of_turn} - {None}
        self.stop_ids: frozenset[int] = frozenset(known)

    @classmethod
    def of(cls, target: Path, template_options: dict[str, Any] | None = None) -> Chat:
        """The chat of a target folder; its stop ids include those of generation_config.json."""
        return cls(
            targets.load_tokenizer(target),
            stop_ids=_generation_stops(target),
            template_options=template_options,
            fingerprint=targets.fingerprint(target),
            context=getattr(targets.text_config(target), "max_position_embeddings", None),
        )

    # render and encode ---------------------------------------------------------------------------------------------

    def render(self, messages: list[Message], tools: list[dict] | None = None, *, generation_prompt: bool = False) -> str:
        """The template's text. Drop when the template refuses these messages."""
        try:
            return self.tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=generation_prompt, tokenize=False, **self.template_options
            )
        except Exception as error:  # templates raise whatever Jinja and Python raise inside them
            raise Drop("chat template refuses the conversation", (str(error).splitlines() or [""])[0][:200]) from None

    def prompt_ids(self, messages: list[Message], tools: list[dict] | None = None) -> list[int]:
        """What the server gets before it writes the next reply. Drop as in `render`, or on a control token in text."""
        self._refuse_control_tokens(Conversation(messages, tools))
        return self._with_bos(self._encode(self.render(messages, tools, generation_prompt=True)))

    def decode_reply(self, output_ids: Sequence[int]) -> str:
        """A generated reply as the text that a client would send back in the next turn."""
        return self.tokenizer.decode(output_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _encode(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids

    def _with_bos(self, ids: list[int]) -> list[int]:
        """Exactly one BOS in front where the tokenizer wants one; never two."""
        bos, start = self.tokenizer.bos_token_id, 0
        while bos is not None and ids[start : start + 2] == [bos, bos]:
            start += 1
        missing = self._wants_bos and ids[:1] != [bos]
        return [bos, *ids] if missing else ids[start:]

    # rows ----------------------------------------------------------------------------------------------------------

    def rows(self, record: Record, *, train: str = "all", thinking: bool = True) -> list[Row | Drop]:
        """The rows of a record whose replies are in the data; each row that cannot be built stands as its Drop.

        train: "all" replies or the "last" one only. thinking: train the text up to </think> too.
        """
        try:
            if isinstance(record, Tokenised):
                return [self._tokenised_row(record)]
            if isinstance(record, Rendered):
                return [self._marked_row(self._with_bos(self._encode(record.text)))]
            return self._conversation_rows(record, train, thinking)
        except Drop as drop:
            return [drop]

    def _conversation_rows(self, conversation: Conversation, train: str, thinking: bool) -> list[Row | Drop]:
        self._refuse_control_tokens(conversation)
        replies = conversation.replies if train == "all" else conversation.replies[-1:]
        if not replies:
            raise Drop("no reply in the record")
        row = self._row(conversation, replies, thinking)
        if row is not None:
            return [row]
        return [self._single_reply_row(conversation, reply, thinking) for reply in replies]

    def _single_reply_row(self, conversation: Conversation, reply: int, thinking: bool) -> Row | Drop:
        try:
            upto = Conversation(conversation.messages[: reply + 1], conversation.tools)
            return self._row(upto, [reply], thinking) or Drop(NOT_A_PREFIX)
        except Drop as drop:
            return drop

    def _row(self, conversation: Conversation, replies: list[int], thinking: bool) -> Row | None:
        """The whole conversation as one row, or None when its history is rewritten on the way."""
        messages, tools = conversation.messages, conversation.tools
        whole = _Encoded(self, self.render(messages, tools))
        self._check_turns_shown(conversation, whole.text)
        mask = [False] * len(whole.ids)
        for reply in replies:
            history = self.render(messages[:reply], tools, generation_prompt=True)
            through = whole.text if reply == len(messages) - 1 else self.render(messages[: reply + 1], tools)
            begin, end = whole.tokens_of_prefix(history), whole.tokens_of_prefix(through)
            if begin is None or end is None or begin >= end:
                return None
            self._check_reply_shown(messages[reply], through[len(history) :], thinking)
            begin, end = self._supervised(whole.ids, begin, end, thinking)
            mask[begin:end] = [True] * (end - begin)
        ids = self._with_bos(whole.ids)
        shift = len(ids) - len(whole.ids)  # +1: a BOS was put in front; negative: surplus ones went
        return Row(ids, [False] * shift + mask[max(0, -shift) :])

    def _supervised(self, ids: list[int], begin: int, end: int, thinking: bool) -> tuple[int, int]:
        """The supervised range of a reply whose render is ids[begin:end]: from its first token, or the one behind
        </think>, through its end-of-turn token, which is the last control token of its render.

        Some templates let the next turn's header end a reply (GLM); then that token, a stop token, is its end.
        """
        closed = next((i for i in reversed(range(begin, end)) if ids[i] in self.special_ids), None)
        if not thinking:
            begin += self.thinking_length(ids[begin:end])
        if closed is not None:
            return begin, closed + 1
        return begin, end + (end < len(ids) and ids[end] in self.stop_ids)

    def thinking_length(self, reply_ids: Sequence[int]) -> int:
        """How many tokens of a reply come before its answer: through the last </think>; 0 when it has none."""
        think_end = self._think_end
        return next((i + 1 for i in reversed(range(len(reply_ids))) if reply_ids[i] == think_end), 0)

    @cached_property
    def _think_end(self) -> int:
        token = self.tokenizer.get_vocab().get(THINK_END)
        if token is None or self._encode_cached(THINK_END) != [token]:
            raise ParamError(f"train_thinking=False needs a tokenizer with {THINK_END!r} as one token; this one has none")
        return token

    # checks --------------------------------------------------------------------------------------------------------

    def _refuse_control_tokens(self, conversation: Conversation) -> None:
        if found := self._control.search(conversation.canonical):
            raise Drop("control token in text", found.group())

    def _check_turns_shown(self, conversation: Conversation, text: str) -> None:
        """A template that leaves out a turn, a tool list or a call would shorten the conversation in silence."""
        for message in conversation.messages:
            if message["role"] in ("system", "user") and message["content"].strip() not in text:
                raise Drop("turn is missing from the render", message["role"])
            if any(call["function"]["name"] not in text for call in message.get("tool_calls", ())):
                raise Drop("turn is missing from the render", "tool call")
        names = [tool.get("function", tool).get("name") for tool in conversation.tools or ()]
        if any(isinstance(name, str) and name not in text for name in names):
            raise Drop("turn is missing from the render", "tool list")
        self._check_results_shown(conversation, text)

    def _check_results_shown(self, conversation: Conversation, text: str) -> None:
        for i, message in enumerate(conversation.messages):
            without = conversation.messages[:i] + conversation.messages[i + 1 :]
            if message["role"] == "tool" and self.render(without, conversation.tools) == text:
                raise Drop("turn is missing from the render", "tool result")

    def _check_reply_shown(self, message: Message, reply_text: str, thinking: bool) -> None:
        """Whatever is left out of a trained reply would never be learnt, and nobody would notice."""
        parts = spoken_parts(message) if thinking else [message["content"].rpartition(THINK_END)[2].strip()]
        if any(part not in reply_text for part in parts):
            raise Drop("part of the reply is missing from the render")

    # ids that came without a conversation --------------------------------------------------------------------------

    def _tokenised_row(self, record: Tokenised) -> Row:
        if max(record.input_ids) >= len(self.tokenizer):
            raise Drop("token id outside the vocabulary", f"{max(record.input_ids)} of {len(self.tokenizer)}")
        if record.loss_mask is None:
            return self._marked_row(record.input_ids)
        if not any(record.loss_mask):
            raise Drop("no supervised tokens")
        return Row(record.input_ids, record.loss_mask)

    def _marked_row(self, ids: list[int]) -> Row:
        """Mask every stretch behind a generation prompt, through the stop token. The prompt is found as token ids."""
        opening, mask = self.generation_prompt, [False] * len(ids)
        at, size = 0, len(opening)
        while size and at + size <= len(ids):
            if ids[at : at + size] != opening:
                at += 1
                continue
            begin = at + size
            end = next((i + 1 for i in range(begin, len(ids)) if ids[i] in self.stop_ids), len(ids))
            mask[begin:end] = [True] * (end - begin)
            at = end
        if not any(mask):
            raise Drop("no reply found in rendered text")
        return Row(ids, mask)

    def _probe(self) -> tuple[list[int], int | None]:
        """(ids of the generation prompt, id of the end-of-turn token), taken from the render of one plain exchange."""
        try:
            asked = [{"role": "user", "content": "a"}]
            before, prompt = self.render(asked), self.render(asked, generation_prompt=True)
            whole = self._encode(self.render([*asked, {"role": "assistant", "content": "b"}]))
        except Drop as drop:
            raise Eagle3Error(f"the target's chat template cannot render one user turn and one reply: {drop.detail}") from None
        opening = self._encode(prompt[len(before) :]) if prompt.startswith(before) else []
        begin = len(self._encode(prompt))
        closing = [i for i in whole[begin:] if i in self.special_ids]
        return opening, closing[-1] if closing else None


class _Encoded:
    """A rendered text and its ids, with the question that the mask rule asks: is this shorter text a token prefix?"""

    def __init__(self, chat: Chat, text: str):
        self.text, self._chat = text, chat
        # encode_batch, because it lets other threads run meanwhile and encode does not
        (self._encoding,) = chat._backend.encode_batch([text], add_special_tokens=False)
        self.ids: list[int] = self._encoding.ids

    def tokens_of_prefix(self, prefix: str) -> int | None:
        """How many tokens `prefix` has, when its ids are the first ids of the whole; else None."""
        if not self.text.startswith(prefix):
            return None
        if len(prefix) == len(self.text):
            return len(self.ids)
        return self._by_last_control_token(len(prefix)) or self._by_encoding(prefix)

    def _by_last_control_token(self, at: int) -> int | None:
        """Tokenizers cut text at control tokens before anything else, so ids before one never depend on what follows
        it: it is enough to encode the few characters from the last control token to `at`. None: cannot tell."""
        token = self._encoding.char_to_token(at)
        if token is None or self._encoding.token_to_chars(token)[0] != at:
            return None
        last = next((i for i in range(token - 1, -1, -1) if self.ids[i] in self._chat.special_ids), None)
        if last is None:
            return None
        tail = self.text[self._encoding.token_to_chars(last)[0] : at]
        return token if self._chat._encode_cached(tail) == self.ids[last:token] else None

    def _by_encoding(self, prefix: str) -> int | None:
        ids = self._chat._encode(prefix)
        return len(ids) if self.ids[: len(ids)] == ids else None


def _generation_stops(target: Path) -> list[int]:
    file = target / "generation_config.json"
    stops = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
    return stops if isinstance(stops, list) else [] if stops is None else [stops]
