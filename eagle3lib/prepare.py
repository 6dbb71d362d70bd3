"""Prepare: conversations into training rows. What notebooks/01_prepare.ipynb calls, in this order:

    loaded = prepare.load(options)                           # records, parsed, cleaned, sampled
    book = prepare.answer(loaded, chat, engine, run_dir)     # only for answer="target": the target replies
    prepared = prepare.build(loaded, chat, run_dir, book)    # rows, split, accounting -> <run>/prepared/

Identity is content: a row's sample id is the hash of its ids and mask, the held-out split depends on the first
prompt alone, and the order of the rows on ids and seed. Neither moves when files are renamed, reordered or grown.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from eagle3lib import conversations, evalsets, prepared, sources
from eagle3lib.accounting import Accounting
from eagle3lib.answers import Answer, AnswerBook
from eagle3lib.chat import Chat
from eagle3lib.conversations import Drop, Record
from eagle3lib.errors import Eagle3Error, ParamError
from eagle3lib.options import Options
from eagle3lib.overlap import Runs
from eagle3lib.prepared import Prepared, load_prepared
from eagle3lib.preview import accounting_table, samples_html
from eagle3lib.progress import tqdm
from eagle3lib.records import DUPLICATE, OVERLAP, Item, Loaded, load, nothing_left
from eagle3lib.replay import Replay, replay
from eagle3lib.rows import CUT, Draft, Encoded, Row, fit
from eagle3lib.seen import Seen
from eagle3lib.store import sample_id

__all__ = ["Options", "accounting_table", "answer", "build", "load", "load_prepared", "samples_html"]

ANSWERS = "answers.jsonl"
_MODULES = ("chat", "conversations", "options", "overlap", "places", "prepare", "prepared", "records", "replay", "rows", "seen", "sources")
_CHUNK = 4096  # conversations in memory at a time
_BATCH_CHARS = 300_000  # of text encoded at a time
_HELDOUT_SEED = 0xEA61E3  # fixed: the split must not move with the run's seed


# answer ------------------------------------------------------------------------------------------------------------


def answer(loaded: Loaded, chat: Chat, engine: Any, run_dir: Path) -> AnswerBook:
    """Let the target answer every user turn; returns the book of answers, kept in <run>/answers.jsonl.

    engine: one, or several alike that share the prompts. Each has `generate(ids, max_new_tokens=, temperature=,
    concurrency=, stop_token_ids=, progress=, on_result=)`, with sampling_seed= too when the temperature is not 0, as in
    eagle3lib.engine.Engine; and perhaps `fingerprint`, which becomes part of what an answer is kept for. Killed at any
    moment and run again, it asks only for what is missing.
    """
    options = loaded.options
    _require_fit(options, chat)
    engines = list(engine) if isinstance(engine, Sequence) else [engine]
    marks = [getattr(one, "fingerprint", {}) for one in engines]
    if any(mark != marks[0] for mark in marks):
        raise Eagle3Error("the engines that are to answer differ in version, dtype or settings; start them alike, or answer with one")
    scope = {"target": chat.fingerprint, "engine": marks[0], "sampling": options.sampling}
    book = AnswerBook(Path(run_dir) / ANSWERS, scope)
    with book, _Progress(_count_turns(loaded)) as progress:
        items = loaded.items(Accounting())
        while chunk := [item.record for item in itertools.islice(items, _CHUNK)]:
            _answer_all(chunk, chat, engines, book, options, progress)
            progress.reached(sum(map(_turns, chunk)))
    return book


def _turns(record: Record) -> int:
    assert isinstance(record, conversations.Conversation)  # _read has seen to it
    return sum(message["role"] == "user" for message in record.messages)


def _count_turns(loaded: Loaded) -> int:
    """Without a sample the source is read once more for this: a small part of the hours that it lets us foretell."""
    items = loaded.items(Accounting())
    return sum(_turns(item.record) for item in tqdm(items, desc="count", total=loaded.size, unit=" records", mininterval=1, leave=False))


class _Progress:
    """One bar over all user turns of all conversations: done, time left, tokens/s. Turns that were answered before, and
    those that need no answer (dropped, or shared by conversations), count when their chunk is through."""

    def __init__(self, turns: int):
        self._bar = tqdm(total=turns, desc="answer", unit=" turns", mininterval=1)
        self._begun, self._through, self._tokens_in, self._tokens_out = time.monotonic(), 0, 0, 0

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def replied(self, prompt_tokens: int, output_tokens: int) -> None:
        self._tokens_in += prompt_tokens
        self._tokens_out += output_tokens
        seconds = max(time.monotonic() - self._begun, 1e-9)
        self._bar.set_postfix_str(f"{self._tokens_in / seconds:,.0f} tok/s in, {self._tokens_out / seconds:,.0f} tok/s out", refresh=False)
        self._bar.update()

    def reached(self, turns: int) -> None:
        """A chunk of so many turns is through."""
        self._through += turns
        self._bar.update(self._through - self._bar.n)


def _require_fit(options: Options, chat: Chat) -> None:
    """The options must suit the target. A row is sent to the server with room for one new token."""
    if not options.train_thinking:
        _ = chat.think_ids  # ParamError, before hours of answering
    if chat.context is not None and options.max_tokens >= chat.context:
        raise ParamError(f"max_tokens is {options.max_tokens}; it must be less than the target's context of {chat.context} tokens")


def _answer_all(records: list[Record], chat: Chat, engines: list[Any], book: AnswerBook, options: Options, progress: _Progress) -> None:
    """Round r asks the r-th user turn of every conversation that has one."""
    while True:
        missing: dict[bytes, list[int]] = {}
        waiting = []
        for record in records:
            prompt = _replay(record, chat, book, options).missing
            if prompt is not None:
                missing[book.key(prompt)] = prompt
                waiting.append(record)
        if not missing:
            return
        _ask(list(missing.values()), chat, engines, book, options, progress)
        records = waiting


def _ask(prompts: list[list[int]], chat: Chat, engines: list[Any], book: AnswerBook, options: Options, progress: _Progress) -> None:
    """Every engine takes its share of the prompts. When one fails the others finish theirs, and what was answered is kept."""
    writing = threading.Lock()

    def ask(engine: Any, mine: list[list[int]]) -> None:
        def keep(index: int, reply: Any) -> None:
            with writing:
                book.put(mine[index], _closed(reply, chat))
                progress.replied(len(mine[index]), len(reply.output_ids))

        engine.generate(mine, **options.sampling, concurrency=options.concurrency, stop_token_ids=sorted(chat.stop_ids), progress=None,
                        on_result=keep)

    if len(engines) == 1:
        ask(engines[0], prompts)
        return
    with ThreadPoolExecutor(len(engines)) as pool:
        asked = [pool.submit(ask, engine, prompts[n :: len(engines)]) for n, engine in enumerate(engines) if prompts[n:]]
    for one in asked:
        one.result()


def _closed(reply: Any, chat: Chat) -> Answer:
    """The reply with the stop token that the target wrote, should the server have left it out; nothing is added to a
    reply that was cut at the limit."""
    ids = list(reply.output_ids)
    if reply.finish_reason == "stop" and chat.end_of_turn is not None and (not ids or ids[-1] not in chat.stop_ids):
        ids.append(chat.end_of_turn)
    return Answer(ids, reply.finish_reason, getattr(reply, "error", ""))


def _replay(record: Record, chat: Chat, book: AnswerBook, options: Options) -> Replay:
    assert isinstance(record, conversations.Conversation)  # _read has seen to it
    return replay(chat, record, book, max_tokens=options.max_tokens, truncated=options.truncated, train=options.train_turns,
                  thinking=options.train_thinking)


# build -------------------------------------------------------------------------------------------------------------


def build(loaded: Loaded, chat: Chat, run_dir: Path, book: AnswerBook | None = None) -> Prepared:
    """Make the rows and write <run>/prepared/ (all or nothing); an unchanged preparation is reused.

    book: the answers, for answer="target". Raises Eagle3Error when no row is left, with the table of reasons.
    """
    options = loaded.options
    _require_fit(options, chat)
    if options.answer == "target" and book is None:
        raise Eagle3Error('answer="target" needs the book of answers: call prepare.answer first')
    key = _preparation_key(options, chat, book)
    if key and (found := prepared.find(run_dir, key)):
        return found
    accounting = Accounting()
    rows = _kept(_outcomes(loaded, chat, book, accounting), options, accounting)
    about = {"key": key, "options": options.content(), "fingerprint": chat.fingerprint, "answers": book.scope if book else None}
    with prepared.Writer(run_dir, options.seed, len(chat.tokenizer)) as writer:
        for item, ids, mask, name in rows:
            writer.add(ids, mask, item.source, name, _is_heldout(item.record, options.heldout_share))
        accounting.require_balance()
        if not accounting.total.rows_kept:
            raise nothing_left(options, accounting)
        return writer.finish(accounting, about)


def _preparation_key(options: Options, chat: Chat, book: AnswerBook | None) -> str | None:
    """Equal keys mean equal rows. None when the source's content cannot be hashed: then nothing is reused."""
    digests = [sources.digest(part.name) for part in options.mix()]
    if None in digests:
        return None
    held_out = [[p.turns for p in evalsets.load(name)] for name in evalsets.NAMES] if options.decontaminate else []
    names = sorted(sources.names_of(part.name for part in options.mix()).values())
    parts = [prepared.FORMAT, options.content(), names, chat.fingerprint, sorted(chat.stop_ids), digests, held_out, _code(),
             book.scope_hash if book else None]
    return xxhash.xxh3_128_hexdigest(json.dumps(parts, sort_keys=True).encode())


def _code() -> list[str]:
    """What turns records into rows: our own modules, and the packages that render and encode."""
    modules = [xxhash.xxh3_128_hexdigest(Path(__file__).with_name(f"{name}.py").read_bytes()) for name in _MODULES]
    return modules + [f"{name} {importlib.metadata.version(name)}" for name in ("jinja2", "tokenizers", "transformers")]


Outcome = tuple[Item, Row]


def _outcomes(loaded: Loaded, chat: Chat, book: AnswerBook | None, accounting: Accounting) -> Iterator[Outcome]:
    """All rows of all records; drops are counted."""
    options = loaded.options
    items = tqdm(loaded.items(accounting), desc="rows", total=loaded.size, unit=" records", mininterval=1)
    pairs = _from_data(items, chat, options) if book is None else ((item, _answered(item.record, chat, book, options)) for item in items)
    for item, outcomes in pairs:
        accounting.of(item.source).rows_split += len(outcomes) - 1
        accounting.own_starts += len(outcomes) * _has_own_starts(item.record)
        for outcome in outcomes:
            if isinstance(outcome, Drop):
                accounting.drop(item.source, outcome.reason, item.where, outcome.detail)
            else:
                yield item, outcome


def _has_own_starts(record: Record) -> bool:
    """May the replies of its rows lawfully begin elsewhere than behind the generation prompt that a user turn gets?"""
    if isinstance(record, conversations.Conversation):
        return any(message["role"] == "tool" for message in record.messages)  # some templates have no header behind a tool result
    return isinstance(record, conversations.Tokenised) and record.loss_mask is not None


def _from_data(items: Iterable[Item], chat: Chat, options: Options) -> Iterator[tuple[Item, list[Row | Drop]]]:
    """(item, its rows) in the items' order. Batches are encoded in a thread, on all cores and outside of Python, while
    the next ones are rendered here and the last ones get their masks."""
    waiting: deque[tuple[list[Item], Future[list[list[Encoded | Row | Drop]]]]] = deque()
    with ThreadPoolExecutor(1) as pool:
        for batch, plans in _batches(items, chat, options):
            waiting.append((batch, pool.submit(chat.encode, plans)))
            if len(waiting) > 2:
                yield from _finished(chat, *waiting.popleft())
        while waiting:
            yield from _finished(chat, *waiting.popleft())


def _batches(items: Iterable[Item], chat: Chat, options: Options) -> Iterator[tuple[list[Item], list[list[Draft | Row | Drop]]]]:
    """Items and their plans, up to a number of characters, so that long records take no more memory than short ones."""
    batch: list[Item] = []
    plans: list[list[Draft | Row | Drop]] = []
    size = 0
    held_out = Runs.of_evalsets() if options.decontaminate else None
    for item in items:
        plan = _plan(item.record, chat, options, held_out)
        batch.append(item)
        plans.append(plan)
        size += 256 + sum(len(part.text) for part in plan if isinstance(part, Draft))
        if size > _BATCH_CHARS:
            yield batch, plans
            batch, plans, size = [], [], 0
    yield batch, plans


def _plan(record: Record, chat: Chat, options: Options, held_out: Runs | None) -> list[Draft | Row | Drop]:
    if options.truncated == "drop" and isinstance(record, conversations.Conversation) and record.cut:
        return [Drop(CUT)]
    if held_out and isinstance(record, conversations.Tokenised) and max(record.input_ids) < len(chat.tokenizer):
        if shared := held_out.meets(chat.tokenizer.decode(record.input_ids)):  # the cleaning before had no tokenizer to read ids with
            return [Drop(OVERLAP, repr(shared))]
    return chat.plan(record, train=options.train_turns, thinking=options.train_thinking)


def _finished(chat: Chat, batch: list[Item], encoded: Future[list[list[Encoded | Row | Drop]]]) -> Iterator[tuple[Item, list[Row | Drop]]]:
    return zip(batch, map(chat.finish, encoded.result()), strict=True)


def _answered(record: Record, chat: Chat, book: AnswerBook, options: Options) -> list[Row | Drop]:
    result = _replay(record, chat, book, options)
    if result.missing is not None:
        raise Eagle3Error("some prompts have no answer yet; call prepare.answer again, it asks only for what is missing")
    return result.outcomes


Kept = tuple[Item, np.ndarray, np.ndarray, str]


def _kept(outcomes: Iterator[Outcome], options: Options, accounting: Accounting) -> Iterator[Kept]:
    """(item, ids [T] int32, mask [T] bool, sample id) of the rows that fit max_tokens, each content once."""
    seen = Seen()
    for item, row in outcomes:
        try:
            cut = fit(row, options.max_tokens)
        except Drop as drop:
            accounting.drop(item.source, drop.reason, item.where, drop.detail)
            continue
        ids, mask = np.array(cut.input_ids, dtype=np.int32), np.array(cut.loss_mask, dtype=bool)
        name = sample_id(ids, mask)
        if not seen.add(name.encode()):
            accounting.drop(item.source, DUPLICATE, item.where)
            continue
        count = accounting.of(item.source)
        count.rows_kept += 1
        count.rows_cut += len(cut.input_ids) < len(row.input_ids)
        yield item, ids, mask, name


def _is_heldout(record: Record, share: float) -> bool:
    """By the first prompt, so that all rows of a conversation, and other answers to it, fall on the same side."""
    return xxhash.xxh3_64_intdigest(record.first_prompt.strip().encode(), seed=_HELDOUT_SEED) < share * 2**64
