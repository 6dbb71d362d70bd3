"""Chat: a conversation into exactly the token ids that the server sees, and the mask of the reply tokens.

Text is rendered by the target's own chat template and encoded as SGLang's chat endpoint does it: render to text,
then encode without added special tokens. One difference: where the tokenizer wants a BOS and the template has none,
one is put in front.

The mask rule. For a trained reply the mask begins where `render(history, add_generation_prompt=True)` ends, counted
in tokens, and runs through the reply's end-of-turn token: the first token of its render at which the target stops.
The history must be a token prefix of the whole render; else the template rewrites history (drops earlier thinking,
say) and every reply becomes a row of its own; a reply whose own history is no prefix either is dropped. Nothing is
searched for in rendered text.

Control tokens in text. "<|im_end|>" typed by a user would be encoded as the real end of a turn, here and in the
server. Such a conversation is dropped with the reason "control token in text": a control token in a row is always
the template's own, which is what makes the end of a reply certain. Tokens that the tokenizer does not mark as special
(often "<think>", "<tool_call>") are ordinary text.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from eagle3lib import targets
from eagle3lib.conversations import Conversation, Drop, Message, Record, Rendered, Tokenised, spoken_parts
from eagle3lib.errors import Eagle3Error, ParamError
from eagle3lib.rows import NOT_A_PREFIX, Draft, Encoded, Row

THINK, THINK_END = "<think>", "</think>"
OPTIONS_TAKEN = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "tokenize", "chat_template"}
_DAY = datetime(2024, 7, 26)


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
        self.template_options = self._known(template_options or {})
        self.fingerprint = {**(fingerprint or {}), "template_options": json.dumps(self.template_options, sort_keys=True)}
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()  # some tokenizer.json files carry a length limit; rows are cut by `fit` alone
        self._backend.no_padding()
        self._encode_cached = lru_cache(4096)(self._encode)
        self.stop_ids: frozenset[int] = frozenset({*stop_ids, tokenizer.eos_token_id} - {None})
        added = {i: t.content for i, t in tokenizer.added_tokens_decoder.items() if t.special or i in self.stop_ids}
        self.special_ids = frozenset(added) | frozenset(tokenizer.all_special_ids)
        self.control_tokens = sorted({*added.values(), *tokenizer.all_special_tokens} - {""}, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, self.control_tokens)) or r"(?!)")
        self._wants_bos = tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
        self._variables = {**self._clock(), **self.template_options}
        self.generation_prompt, self.end_of_turn = self._probe()
        self.stop_ids |= frozenset(() if self.end_of_turn is None else (self.end_of_turn,))

    @classmethod
    def of(cls, target: Path, template_options: dict[str, Any] | str | None = None) -> Chat:
        """The chat of a target folder; its stop ids include those of generation_config.json. template_options: a
        dictionary, or one as JSON text. ParamError when the template knows no such option."""
        return cls(
            targets.load_tokenizer(target),
            stop_ids=_generation_stops(target),
            template_options=_parsed(template_options) if isinstance(template_options, str) else template_options,
            fingerprint=targets.fingerprint(target),
            context=getattr(targets.text_config(target), "max_position_embeddings", None),
        )

    def _known(self, options: dict[str, Any]) -> dict[str, Any]:
        """A misspelt option would be taken without a word, and change nothing."""
        template = str(self.tokenizer.chat_template)
        for name in options:
            if name in OPTIONS_TAKEN or not re.search(rf"\b{re.escape(name)}\b", template):
                raise ParamError(f"template_options: the target's chat template knows no option {name!r}")
        return dict(options)

    def _clock(self) -> dict[str, Any]:
        """Some templates write today's date. Rows must not change over night, so for them it is always the same day:
        the one that Llama 3 falls back on. (Another: the template's own option, often date_string.)"""
        return {"strftime_now": _DAY.strftime} if "strftime_now" in str(self.tokenizer.chat_template) else {}

    # render and encode ---------------------------------------------------------------------------------------------

    def render(self, messages: list[Message], tools: list[dict] | None = None, *, generation_prompt: bool = False) -> str:
        """The template's text. Drop when the template refuses these messages."""
        try:
            return self.tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=generation_prompt, tokenize=False, **self._variables
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

    def _with_bos_row(self, ids: list[int], mask: list[bool]) -> Row:
        whole = self._with_bos(ids)
        if len(whole) == len(ids):
            return Row(ids, mask)
        shift = len(whole) - len(ids)  # +1: a BOS was put in front; negative: surplus ones went
        return Row(whole, [False] * shift + mask[max(0, -shift) :])

    def _with_bos(self, ids: list[int]) -> list[int]:
        """Exactly one BOS in front where the tokenizer wants one; never two."""
        bos, start = self.tokenizer.bos_token_id, 0
        while bos is not None and ids[start : start + 2] == [bos, bos]:
            start += 1
        missing = self._wants_bos and ids[:1] != [bos]
        return [bos, *ids] if missing else ids[start:] if start else ids

    # rows ----------------------------------------------------------------------------------------------------------

    def rows(self, record: Record, *, train: str = "all", thinking: bool = True) -> list[Row | Drop]:
        """The rows of a record whose replies are in the data; each row that cannot be built stands as its Drop.

        train: "all" replies or the "last" one only. thinking: train the text up to </think> too.
        """
        return self.finish(*self.encode([self.plan(record, train=train, thinking=thinking)]))

    def plan(self, record: Record, *, train: str = "all", thinking: bool = True) -> list[Draft | Row | Drop]:
        """The first of the three steps of `rows`, which many records take together: render, encode all at once, mask."""
        try:
            if isinstance(record, Tokenised):
                return [self._tokenised_row(record, train, thinking)]
            if isinstance(record, Rendered):
                return [Draft(record.text, record, thinking, train=train)]
            return self._drafts(record, train, thinking)
        except Drop as drop:
            return [drop]

    def encode(self, plans: Sequence[Sequence[Draft | Row | Drop]]) -> list[list[Encoded | Row | Drop]]:
        """The second step. Nearly all of its time is spent outside of Python, on all cores."""
        texts = [part.text for plan in plans for part in plan if isinstance(part, Draft)]
        encodings = iter(self._backend.encode_batch(texts, add_special_tokens=False) if texts else ())
        return [[self._encoded(part, next(encodings)) if isinstance(part, Draft) else part for part in plan] for plan in plans]

    def _encoded(self, draft: Draft, encoding: Any) -> Encoded:
        return Encoded(draft, encoding, self._encode_cached, self.special_ids)

    def finish(self, parts: Sequence[Encoded | Row | Drop]) -> list[Row | Drop]:
        """The last step."""
        found: list[Row | Drop] = []
        for part in parts:
            try:
                found += self._rows(part) if isinstance(part, Encoded) else [part]
            except Drop as drop:
                found.append(drop)
        return found

    def _drafts(self, conversation: Conversation, train: str, thinking: bool) -> list[Draft | Row | Drop]:
        self._refuse_control_tokens(conversation)
        replies = conversation.replies if train == "all" else conversation.replies[-1:]
        if not replies:
            raise Drop("no reply in the record", "with a weight above 0" if conversation.unwanted else "")
        draft = self._draft(conversation, replies, thinking)
        return [draft] if draft else self._split(conversation, replies, thinking)

    def _split(self, conversation: Conversation, replies: list[int], thinking: bool) -> list[Draft | Row | Drop]:
        """One draft a reply, each with the conversation up to it."""
        found: list[Draft | Row | Drop] = []
        for reply in replies:
            try:
                upto = replace(conversation, messages=conversation.messages[: reply + 1])
                found.append(self._draft(upto, [reply], thinking) or Drop(NOT_A_PREFIX))
            except Drop as drop:
                found.append(drop)
        return found

    def _draft(self, conversation: Conversation, replies: list[int], thinking: bool) -> Draft | None:
        """The whole conversation as one row, or None when its history is rewritten on the way."""
        messages, tools = conversation.messages, conversation.tools
        text = self.render(messages, tools)
        self._check_turns_shown(conversation, text)
        draft = Draft(text, conversation, thinking, replies)
        for reply in replies:
            history = self.render(messages[:reply], tools, generation_prompt=True)
            through = text if reply == len(messages) - 1 else self.render(messages[: reply + 1], tools)
            if not text.startswith(history):
                return None
            draft.histories.append(len(history))
            draft.throughs.append(len(os.path.commonprefix([text, through])) if not text.startswith(through) else len(through))
            draft.closed_alike.append(text.startswith(through))
        return draft

    def _rows(self, encoded: Encoded) -> list[Row | Drop]:
        record = encoded.draft.record
        if isinstance(record, Rendered):
            return [self._marked_row(self._with_bos(encoded.ids), encoded.draft.train, encoded.draft.thinking)]
        assert isinstance(record, Conversation)  # Tokenised records need no encoding
        row = self._row(encoded, record)
        if row is not None:
            return [row]
        if encoded.draft.replies == [len(record.messages) - 1]:
            raise Drop(NOT_A_PREFIX)
        (parts,) = self.encode([self._split(record, encoded.draft.replies, encoded.draft.thinking)])
        return self.finish(parts)

    def _row(self, encoded: Encoded, conversation: Conversation) -> Row | None:
        """The row, or None when some history's ids are not the first ids of the whole."""
        draft, ids, mask = encoded.draft, encoded.ids, [False] * len(encoded.ids)
        begins = [encoded.tokens_before(history) for history in draft.histories]
        for n, begin in enumerate(begins):
            message = conversation.messages[draft.replies[n]]
            end = None if begin is None else self._end(encoded, n, begin)
            if begin is None or end is None or begin >= end:
                return None
            self._check_reply_shown(message, encoded.text_of(draft.histories[n], end), draft.thinking)
            if draft.replies[n] in conversation.cut and ids[end - 1] in self.stop_ids:
                end -= 1  # the template ends every turn; this one never ended
            if not draft.thinking:
                begin += self.thinking_length(ids[begin:end])
            mask[begin:end] = [True] * (end - begin)
        return self._with_bos_row(ids, mask)

    def _end(self, encoded: Encoded, n: int, begin: int) -> int | None:
        """Where the n-th trained reply, whose first token is `begin`, ends: behind its end-of-turn token.

        That is the first token of its render at which the target stops; with none in it, its last control token. Some
        templates let the next turn's header end a reply (GLM); then that token, a stop token, is its end.
        """
        ids, through = encoded.ids, encoded.draft.throughs[n]
        if not encoded.draft.closed_alike[n]:
            stop = next((i + 1 for i in range(begin, len(ids)) if ids[i] in self.stop_ids), None)
            return stop if stop is not None and encoded.chars_through(stop) <= through else None
        end = encoded.tokens_before(through)
        if end is None:
            return None
        stop = next((i for i in range(begin, end) if ids[i] in self.stop_ids), None)
        if stop is None:
            stop = next((i for i in reversed(range(begin, end)) if ids[i] in self.special_ids), None)
        if stop is not None:
            return stop + 1
        return end + (end < len(ids) and ids[end] in self.stop_ids)

    def thinking_length(self, reply_ids: Sequence[int]) -> int:
        """How many tokens of a reply come before its answer: through the last </think>; all of them when the thinking
        was cut off before that; 0 when there is none."""
        opening, closing = self.think_ids
        at = next((i + 1 for i in reversed(range(len(reply_ids))) if reply_ids[i] == closing), 0)
        if at == 0 and (opening in reply_ids or self._opens_thinking(opening, closing)):
            return len(reply_ids)
        return at

    def _opens_thinking(self, opening: int | None, closing: int) -> bool:
        """Does the generation prompt itself begin the thinking?"""
        tags = [i for i in self.generation_prompt if i in (opening, closing)]
        return tags[-1:] == [opening]

    @cached_property
    def think_ids(self) -> tuple[int | None, int]:
        """The tokens <think> (None: not one token) and </think>. ParamError when the latter is not one token."""
        opening, closing = (self.tokenizer.get_vocab().get(tag) for tag in (THINK, THINK_END))
        if closing is None or self._encode_cached(THINK_END) != [closing]:
            raise ParamError(f"train_thinking=False needs a tokenizer with {THINK_END!r} as one token; this one has none")
        return opening, closing

    # checks --------------------------------------------------------------------------------------------------------

    def _refuse_control_tokens(self, conversation: Conversation) -> None:
        for text in conversation.strings:
            if found := self._control.search(text):
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

    def _tokenised_row(self, record: Tokenised, train: str, thinking: bool) -> Row:
        if max(record.input_ids) >= len(self.tokenizer):
            raise Drop("token id outside the vocabulary", f"{max(record.input_ids)} of {len(self.tokenizer)}")
        if record.loss_mask is None:
            return self._marked_row(self._with_bos(record.input_ids), train, thinking)
        if not any(record.loss_mask):
            raise Drop("no supervised tokens")
        return self._with_bos_row(record.input_ids, record.loss_mask)

    def _marked_row(self, ids: list[int], train: str, thinking: bool) -> Row:
        """The row with the mask of its replies, or of the last one, with or without their thinking."""
        spans, mask = self._reply_spans(ids), [False] * len(ids)
        if not spans:
            raise Drop("no reply found in rendered text")
        for begin, end in spans if train == "all" else spans[-1:]:
            begin += 0 if thinking else self.thinking_length(ids[begin:end])
            mask[begin:end] = [True] * (end - begin)
        return Row(ids, mask)

    def _reply_spans(self, ids: list[int]) -> list[tuple[int, int]]:
        """Every stretch behind a generation prompt, through the stop token. The prompt is found as token ids."""
        opening, spans = self.generation_prompt, []
        at, size = 0, len(opening)
        while size and at + size <= len(ids):
            if ids[at : at + size] != opening:
                at += 1
                continue
            begin = at + size
            end = next((i + 1 for i in range(begin, len(ids)) if ids[i] in self.stop_ids), len(ids))
            spans += [(begin, end)] if begin < end else []
            at = end
        return spans

    def _probe(self) -> tuple[list[int], int | None]:
        """(ids of the generation prompt, id of the end-of-turn token), taken from the render of one plain exchange."""
        try:
            asked = [{"role": "user", "content": "a"}]
            before, prompt = (self._encode(self.render(asked, generation_prompt=wanted)) for wanted in (False, True))
            whole = self._encode(self.render([*asked, {"role": "assistant", "content": "b"}]))
        except Drop as drop:
            raise Eagle3Error(f"the target's chat template cannot render one user turn and one reply: {drop.detail}") from None
        opening = prompt[len(os.path.commonprefix([before, prompt])) :]  # (works on lists too)
        closing = [i for i in whole[len(prompt) :] if i in self.special_ids]
        stops = [i for i in closing if i in self.stop_ids]
        return opening, next(iter(stops[:1] + closing[-1:]), None)


def _parsed(text: str) -> dict[str, Any]:
    try:
        options = json.loads(text or "{}")
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise ParamError(f'template_options: found {text!r}, wanted a JSON object such as {{"enable_thinking": false}}')
    return options


def _generation_stops(target: Path) -> list[int]:
    file = target / "generation_config.json"
    stops = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
    return stops if isinstance(stops, list) else [] if stops is None else [stops]
